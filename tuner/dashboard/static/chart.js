// What every chart shares: type, axes, resizing, and a tip that is built of text nodes.

import { token } from "./colour.js";
import { el, fill, outline } from "./dom.js";
import { number } from "./format.js";

// Built-in symbols are drawn several times faster than paths.
export const SHAPES = {
  none: "circle", dflash: "triangle", ddtree: "diamond", policy: "rect", other: `path://${outline("other")}`, failed: `path://${outline("failed")}`,
};

export function shapeOf(kind) {
  return SHAPES[kind] ?? SHAPES.other;
}

export class Chart {
  // `label` says to those who cannot see it what the chart shows.
  constructor(height, label) {
    this.canvas = el("div", { className: "chart", role: "img", "aria-label": label, style: { height: `${height}px` } });
    this.tip = el("div", { className: "tip", hidden: true });
    this.node = el("div", { className: "holder" }, this.canvas, this.tip);
    this.observer = new ResizeObserver(() => {
      const { clientWidth, clientHeight } = this.canvas;
      if (this.chart && (this.chart.getWidth() !== clientWidth || this.chart.getHeight() !== clientHeight)) this.chart.resize();
    });
    this.handlers = [];
  }

  on(type, handler) {
    this.handlers.push([type, handler]);
    this.chart?.on(type, handler);
  }

  // Draw; to be called once the node is on the page.
  draw(option) {
    if (this.chart === undefined) {
      this.chart = echarts.init(this.canvas, null, { renderer: "canvas" });
      for (const [type, handler] of this.handlers) this.chart.on(type, handler);
      this.observer.observe(this.canvas);
    }
    this.chart.setOption({ ...base(), ...option }, { notMerge: true });
  }

  showTip(event, ...children) {
    fill(this.tip, ...children);
    this.tip.hidden = false;
    const [width, height] = [this.node.clientWidth, this.node.clientHeight];
    const { offsetX, offsetY } = event.event ?? event;
    const left = offsetX + 16 + this.tip.offsetWidth > width ? offsetX - 16 - this.tip.offsetWidth : offsetX + 16;
    const top = Math.min(height - this.tip.offsetHeight - 4, Math.max(4, offsetY - this.tip.offsetHeight / 2));
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  dispose() {
    this.observer.disconnect();
    this.chart?.dispose();
    this.chart = undefined;
  }
}

function base() {
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: token("sans"), fontSize: 12, color: token("text") },
    grid: { left: 62, right: 18, top: 16, bottom: 46 },
  };
}

// A value axis with name and unit. `at`: "x" or "y".
export function valueAxis(at, name, more = {}) {
  return {
    type: "value", scale: true, name, nameLocation: "middle", nameGap: at === "x" ? 28 : 46,
    nameTextStyle: { color: token("dim"), fontSize: 12, fontWeight: 500 },
    axisLine: { show: at === "x", lineStyle: { color: token("axis") } },
    axisTick: { show: false },
    axisLabel: { color: token("dim"), fontSize: 11.5, formatter: (value) => tickText(value) },
    splitLine: { lineStyle: { color: token("grid") } },
    ...more,
  };
}

export function categoryAxis(at, name, data, more = {}) {
  return { ...valueAxis(at, name), type: "category", data, scale: undefined, splitLine: { show: false },
    axisLabel: { color: token("dim"), fontSize: 11.5, interval: "auto" }, ...more };
}

function tickText(value) {
  if (Math.abs(value) >= 10_000) return `${Number((value / 1000).toPrecision(4))}k`;
  return String(Number(value.toPrecision(6)));
}

// Bars from low to high at each point: data items are [x, y, xLow, xHigh, yLow, yHigh].
export function whiskers(data, colour, opacity) {
  return {
    type: "custom", silent: true, z: 1, data, clip: true,
    encode: { x: [0, 2, 3], y: [1, 4, 5] },
    renderItem: (params, api) => {
      const [x, y, xLow, xHigh, yLow, yHigh] = [0, 1, 2, 3, 4, 5].map((i) => api.value(i));
      const lines = [];
      const style = { stroke: colour(params.dataIndex), lineWidth: 1.2, opacity: opacity(params.dataIndex), fill: null };
      const line = (from, to) => {
        const [[x1, y1], [x2, y2]] = [api.coord(from), api.coord(to)];
        if ([x1, y1, x2, y2].every(Number.isFinite)) lines.push({ type: "line", shape: { x1, y1, x2, y2 }, style });
      };
      if (Number.isFinite(xLow)) line([xLow, y], [xHigh, y]);
      if (Number.isFinite(yLow)) line([x, yLow], [x, yHigh]);
      return { type: "group", children: lines };
    },
  };
}

// A band between two lines: data items are [x, low, high].
export function band(data, colour, opacity = 0.14) {
  return {
    type: "custom", silent: true, z: 0, data: [data.length], clip: true,
    renderItem: (params, api) => ({
      type: "polygon",
      shape: { points: [...data.map(([x, low]) => api.coord([x, low])), ...data.toReversed().map(([x, , high]) => api.coord([x, high]))] },
      style: { fill: colour, opacity },
    }),
  };
}

export function valueWithUnit(study, name, value, interval) {
  const bounds = interval ? ` [${number(interval[0])}–${number(interval[1])}]` : "";
  return `${number(value)}${bounds} ${study.metric(name).unit}`;
}
