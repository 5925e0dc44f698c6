"""Executes a kernel's schedule: scalar code, memory and copies for real, vector work counted."""

from smalti.estimate.simulate.kernel import Simulation, simulate
from smalti.estimate.simulate.machine import Copy, Wait

__all__ = ["Copy", "Simulation", "Wait", "simulate"]
