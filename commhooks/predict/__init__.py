"""Predicts what compression would save, on any fabric, with the schemes themselves."""

from commhooks.predict.advise import CANDIDATES, Option, advise, best_of, error_of
from commhooks.predict.auto import AutoHook
from commhooks.predict.collectives import collective_seconds
from commhooks.predict.device import DEVICES, Device, ThisDevice, device
from commhooks.predict.fabric import PRESETS, Fabric, Link, fabric, load_fabric, save_fabric
from commhooks.predict.planned import Message, Planned, PredictionError, Work, planned
from commhooks.predict.recorded import Recorder, record
from commhooks.predict.step import Step, predict_step
from commhooks.predict.workload import Buckets, Layer, Workload

__all__ = [
    "CANDIDATES",
    "DEVICES",
    "PRESETS",
    "AutoHook",
    "Buckets",
    "Device",
    "Fabric",
    "Layer",
    "Link",
    "Message",
    "Option",
    "Planned",
    "PredictionError",
    "Recorder",
    "Step",
    "ThisDevice",
    "Work",
    "Workload",
    "advise",
    "best_of",
    "collective_seconds",
    "device",
    "error_of",
    "fabric",
    "load_fabric",
    "planned",
    "predict_step",
    "record",
    "save_fabric",
]
