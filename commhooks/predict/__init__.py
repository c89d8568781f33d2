"""Predicts what compression would save, on any fabric, with the schemes themselves."""

from commhooks.predict.advise import CANDIDATES, Option, advise, best_of, error_of
from commhooks.predict.collectives import collective_seconds
from commhooks.predict.device import (
    DEVICES,
    Contention,
    Device,
    ThisDevice,
    device,
    measure_contention,
)
from commhooks.predict.fabric import PRESETS, Fabric, Link, fabric, load_fabric, save_fabric
from commhooks.predict.headroom import Headroom
from commhooks.predict.link import measure_link
from commhooks.predict.models import MODELS, Model, counted, model
from commhooks.predict.planned import Message, Planned, PredictionError, Work, planned
from commhooks.predict.simulate import Comparison, Row, compare
from commhooks.predict.step import Step, Steps, predict_step, predict_steps
from commhooks.predict.workload import (
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
    "Fabric",
    "Headroom",
    "Layer",
    "Link",
    "Message",
    "Model",
    "Option",
    "Planned",
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
    "counted",
    "device",
    "error_of",
    "fabric",
    "load_fabric",
    "load_workload",
    "measure_contention",
    "measure_link",
    "model",
    "planned",
    "predict_step",
    "predict_steps",
    "record",
    "save_fabric",
    "save_workload",
]
