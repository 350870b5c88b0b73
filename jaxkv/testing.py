"""Opens the one door to what an `LLM` is made of, for tests and benchmarks.

What comes through it may change with any version: programs that use jaxkv have no business here.
"""

from __future__ import annotations

from jaxkv.api.async_llm import AsyncLLM
from jaxkv.api.engine_thread import EngineThread
from jaxkv.api.llm import LLM
from jaxkv.build.blueprint import Blueprint
from jaxkv.build.memory import Budget
from jaxkv.build.model import Model
from jaxkv.config import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.streams import Front
from jaxkv.requests.intake import Intake


def engine_of(llm: LLM | AsyncLLM) -> Engine:
    """Returns the engine, whose attributes without an underscore are for tests to look at."""
    return blocking(llm)._engine


def front_of(llm: LLM | AsyncLLM) -> Front:
    """Returns what runs requests: the engine, or what stands in front of several."""
    return blocking(llm)._front


def model_of(llm: LLM) -> Model:
    """Returns the model with its weights."""
    return llm._model


def config_of(llm: LLM) -> EngineConfig:
    """Returns the limits that the engine was made for, the size of its pool included."""
    return llm._blueprint.limits


def blueprint_of(llm: LLM) -> Blueprint:
    """Returns what the engine was built from."""
    return llm._blueprint


def budget_of(llm: LLM) -> Budget:
    """Returns what the memory is divided into."""
    return llm._budget


def intake_of(llm: LLM | AsyncLLM) -> Intake:
    """Returns the front door, which makes submissions for `Engine.add`."""
    return blocking(llm)._intake


def blocking(llm: LLM | AsyncLLM) -> LLM:
    """Returns the `LLM` that an `AsyncLLM` runs in a thread of its own, or the one given."""
    return llm._llm if isinstance(llm, AsyncLLM) else llm


def thread_of(llm: AsyncLLM) -> EngineThread:
    """Returns the thread that owns the engine of an `AsyncLLM`."""
    return llm._engine
