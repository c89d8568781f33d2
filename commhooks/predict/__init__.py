"""Predicts what compression would save, on any fabric, with the schemes themselves."""

# Modules, in the order in which to read them:
#
# _headroom           what compression could save at most, measured in a job
# _headroom_agent, _headroom_steps the same for a script that knows nothing of it
# _link               what joins the ranks, measured
# _fabric             what joins the ranks, described
# _models, _workload  a training step without communication
# _device             how fast a device encodes and decodes
# _exchange_plan      what a scheme sends and computes
# _collectives        how long a collective takes
# _step               how long a step takes
# _simulate           steps of schemes compared
# _advise             the scheme and bucket size to take
# _quality            the loss of schemes, as measured
# _ladder             the scheme to begin with, by network

from commhooks.predict._advise import CANDIDATES, Option, advise, best_of, error_of
from commhooks.predict._collectives import collective_seconds
from commhooks.predict._device import (
    DEVICES,
    Contention,
    Device,
    ThisDevice,
    device,
    measure_contention,
)
from commhooks.predict._exchange_plan import (
    ExchangePlan,
    Message,
    PredictionError,
    Work,
    trace_exchange,
)
from commhooks.predict._fabric import PRESETS, Fabric, Link, fabric, load_fabric, save_fabric
from commhooks.predict._headroom import Headroom
from commhooks.predict._link import measure_link
from commhooks.predict._models import MODELS, Model, model, model_of
from commhooks.predict._simulate import Comparison, Row, compare
from commhooks.predict._step import Step, Steps, predict_step, predict_steps
from commhooks.predict._workload import (
    Buckets,
    Layer,
    Recorder,
    Workload,
    load_workload,
    record,
    save_workload,
)

__all__ = [
    "CANDIDATES",
    "DEVICES",
    "MODELS",
    "PRESETS",
    "Buckets",
    "Comparison",
    "Contention",
    "Device",
    "ExchangePlan",
    "Fabric",
    "Headroom",
    "Layer",
    "Link",
    "Message",
    "Model",
    "Option",
    "PredictionError",
    "Recorder",
    "Row",
    "Step",
    "Steps",
    "ThisDevice",
    "Work",
    "Workload",
    "advise",
    "best_of",
    "collective_seconds",
    "compare",
    "device",
    "error_of",
    "fabric",
    "load_fabric",
    "load_workload",
    "measure_contention",
    "measure_link",
    "model",
    "model_of",
    "predict_step",
    "predict_steps",
    "record",
    "save_fabric",
    "save_workload",
    "trace_exchange",
]
