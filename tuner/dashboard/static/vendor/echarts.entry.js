// Exactly what the page draws with; see README.md for the command that makes echarts.min.js of it.
import { getInstanceByDom, init, use } from "echarts/core";
import { BarChart, CustomChart, LineChart, ParallelChart, ScatterChart } from "echarts/charts";
import { DataZoomInsideComponent, GridComponent, MarkAreaComponent, MarkLineComponent, ParallelComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([
  BarChart, CustomChart, LineChart, ParallelChart, ScatterChart,
  DataZoomInsideComponent, GridComponent, MarkAreaComponent, MarkLineComponent, ParallelComponent,
  CanvasRenderer,
]);
export { getInstanceByDom, init };
