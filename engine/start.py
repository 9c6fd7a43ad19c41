"""The one place that decides which engine a plan gets: rounds on a device, or `speculate.step`."""

from __future__ import annotations

from engine.device.build import DeviceRuntime, build_device
from engine.device.loop import DeviceLoop
from engine.loop import Loop
from engine.runtime import Plan, Runtime, build

AnyRuntime = Runtime | DeviceRuntime
AnyLoop = Loop | DeviceLoop


def build_any(plan: Plan) -> AnyRuntime:
    """Load what a plan describes.

    Raises:
        EngineError: see `runtime.build` and `device.build.build_device`.
    """
    return build_device(plan) if plan.config.attention.backend == "triton" else build(plan)


def loop_of(runtime: AnyRuntime) -> AnyLoop:
    """Return a loop without requests, counting from zero."""
    return DeviceLoop(runtime) if isinstance(runtime, DeviceRuntime) else Loop(runtime)
