"""The entry point: what vLLM calls in each of its processes."""

import logging
import multiprocessing
from functools import partial
from importlib.util import find_spec
from types import ModuleType

from .on_import import after_import
from .patch import TARGETS, Target, Unexpected, is_native, patch

# A child of vLLM's logger, which is the one that has a handler.
logger = logging.getLogger("vllm.plugins.turnback_engine")


def register() -> None:
    """Let streamed completions carry ``kv_transfer_params``, unless this vLLM does that itself.

    Imports nothing of vLLM's API server, may be called any number of times, and never raises: vLLM
    does not start if a plugin does.
    """
    for target in TARGETS:
        try:
            if _exists(target.module):
                after_import(target.module, partial(_apply, target))
            elif multiprocessing.parent_process() is None:
                # One process is enough to say so.
                _warn(target, f"there is no module {target.module}")
        except Exception as error:
            _warn(target, repr(error))


def _exists(module: str) -> bool:
    # Finding a module imports the packages above it, which in vLLM are empty.
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _apply(target: Target, module: ModuleType) -> None:
    try:
        if is_native(target, module):
            logger.info("turnback: this vLLM streams kv_transfer_params by itself (%s)", target.api)
        elif patch(target, module):
            logger.info("turnback: streamed %s completions carry kv_transfer_params", target.api)
    except Unexpected as error:
        _warn(target, str(error))
    except Exception as error:
        _warn(target, repr(error))


def _warn(target: Target, reason: str) -> None:
    logger.warning(
        "turnback: streamed %s completions will not carry kv_transfer_params, because %s. vLLM works as "
        "without this plugin, but KV reuse between turns works for requests that do not stream only. "
        "Install vLLM 0.33 or later, or a turnback-engine that knows this version.",
        target.api,
        reason,
    )
