"""Tests that predictions of local steps keep to arithmetic."""

from __future__ import annotations

import pytest
import torch

import commhooks
from commhooks.predict import DEVICES, PRESETS, Device, Layer, Workload
from commhooks.predict.local import predict_local

FREE = Device("free", float("inf"), 0.0, float("nan"))
# 100 MB of parameters, a step of 90 ms.
MODEL = Workload.of("model", [Layer(f"w{i}", (500, 5000), 1.0) for i in range(10)], forward_s=0.03)


def local(scheme: str = "none", **options: object) -> float:
    settings = {"every": 10, "ranks": 2, "fabric": PRESETS["1gbe"], "device": FREE, **options}
    return predict_local(commhooks.make(scheme), MODEL, **settings).step_s


def test_local_steps_divide_the_exchange_by_their_number() -> None:
    step = predict_local(
        commhooks.make("none"), MODEL, every=10, ranks=2, fabric=PRESETS["1gbe"], device=FREE
    )
    # Two ranks exchange 100 MB at 0.94 of 125 MB/s.
    assert step.exchange_s == pytest.approx(100e6 / 117.5e6, rel=0.01)
    assert step.step_s == pytest.approx(0.09 + step.exchange_s / 10)
    assert step.utilisation == pytest.approx(0.09 / step.step_s)
    assert step.payload_nbytes == 100_000_000


def test_with_a_delay_only_what_is_before_the_first_message_is_exposed() -> None:
    class Counts(Device):
        """Takes 1 s before a message, 1 ms beside it, 3 s after it; the outer optimizer 10 s."""

        def parts(self, scheme, shapes, ranks):  # type: ignore[no-untyped-def]
            return (1.0, 1e-3, 3.0)

        def seconds(self, work):  # type: ignore[no-untyped-def]
            return 10.0

    device = Counts("counts", 1.0, 0.0, float("nan"))
    waits = {
        delay: 50 * (local(every=50, device=device, delay=delay) - 0.09) for delay in (0, 20, 49)
    }
    wire = 50 * (local(every=50) - 0.09)
    assert waits[0] == pytest.approx(10 + 1 + 3 + wire)
    assert waits[20] == pytest.approx(10 + 1 + 3 + wire - 20 * 0.09)
    assert waits[49] == pytest.approx(10 + 1)


def test_the_outer_optimizer_takes_what_its_memory_takes() -> None:
    device = Device("some", 1e9, 1e-6, float("nan"))
    # A distance and a step with momentum: 64 bytes for each of 25 M entries, and 6 calls for each
    # of 10 parameters. `none` computes an average besides.
    mean = sum(device.parts(commhooks.make("none"), tuple(map(_shape, MODEL.layers)), 2))
    more = 10 * (local(device=device) - local())
    assert more == pytest.approx(64 * 25e6 / 1e9 + 60e-6 + mean)


def _shape(layer: Layer) -> torch.Size:
    return torch.Size(layer.shape)


def test_streaming_hides_what_is_shorter_than_the_delay() -> None:
    # A tenth of the model travels for 0.085 s; a step takes 0.09 s.
    assert local(every=20, fragments=10, delay=1) == pytest.approx(0.09)
    assert local(every=20, fragments=10) == pytest.approx(0.09 + 10 * 0.0853 / 20, rel=0.01)


def test_an_idle_line_starts_slowly_where_it_is_long() -> None:
    wan = PRESETS["wan-4g"]
    idle, busy = (local(every=50, fabric=wan, tcp=tcp) for tcp in (True, False))
    # 10 segments to 14 MB in flight: ten doublings, of which nine are lost, of 30 ms each.
    assert 50 * (idle - busy) == pytest.approx(9 * 0.03, rel=0.1)
    assert local(every=1, fabric=wan, tcp=True) == pytest.approx(local(every=1, fabric=wan))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"fragments": 3}, {"delay": 10}, {"delay": -1}])
def test_settings_that_do_not_fit_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="every is a multiple of fragments"):
        local(**wrong)


def test_devices_cost_time() -> None:
    assert local("int8", device=DEVICES["cpu"]) > local("int8")
