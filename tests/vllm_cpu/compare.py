# SPDX-License-Identifier: Apache-2.0
"""Runs each kernel launch twice, by Triton's interpreter and by the fast one, and compares every byte written."""

import collections
import contextlib
import ctypes
from unittest import mock

import numpy as np
from triton.runtime import interpreter as triton_interpreter
from vllm_cpu_runtime import fast_interpreter


class Writes:
    """What one launch writes: the bytes before, and after it the bytes there."""

    def __init__(self):
        self.before = {}

    def note(self, addresses, mask, size):
        for address in np.atleast_1d(addresses)[np.atleast_1d(mask)].tolist():
            for offset, byte in enumerate(ctypes.string_at(address, size)):
                self.before.setdefault(address + offset, byte)

    def after(self):
        return {address: ctypes.c_ubyte.from_address(address).value for address in self.before}

    def undo(self):
        for address, byte in self.before.items():
            ctypes.c_ubyte.from_address(address).value = byte

    @contextlib.contextmanager
    def watch_triton(self):
        real = triton_interpreter._interpreter

        def store(addresses, data, mask):
            self.note(addresses, mask, data.itemsize)
            return real.store(addresses, data, mask)

        def atomic_rmw(operation, addresses, data, mask, semantics):
            self.note(addresses, mask, data.itemsize)
            return real.atomic_rmw(operation, addresses, data, mask, semantics)

        watched = mock.Mock(wraps=real, store=store, atomic_rmw=atomic_rmw, load=real.load)
        watched.RMW_OP, watched.MEM_SEMANTIC = real.RMW_OP, real.MEM_SEMANTIC
        with mock.patch.object(triton_interpreter, "_interpreter", watched):
            yield

    @contextlib.contextmanager
    def watch_fast(self):
        poke, scatter, atomic = (
            fast_interpreter.poke,
            fast_interpreter.scatter,
            fast_interpreter.atomic,
        )

        def watched_poke(c_type, address, value):
            self.note(address, True, ctypes.sizeof(c_type))
            poke(c_type, address, value)

        def watched_scatter(addresses, data, mask):
            self.note(addresses, mask, data.itemsize)
            scatter(addresses, data, mask)

        def watched_atomic(operation, addresses, data, mask):
            self.note(addresses, mask, data.itemsize)
            return atomic(operation, addresses, data, mask)

        with mock.patch.multiple(
            fast_interpreter, poke=watched_poke, scatter=watched_scatter, atomic=watched_atomic
        ):
            yield


def launch_twice(kernel, *args, grid, **kwargs):
    """Launch `kernel` both ways from the same memory; leave what the fast interpreter wrote."""
    arguments = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    expected, actual = Writes(), Writes()
    with expected.watch_triton():
        triton_interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, grid)(
            *args, **arguments
        )
    after_triton = expected.after()
    expected.undo()
    with actual.watch_fast():
        fast_interpreter.run(kernel, *args, grid=grid, **arguments)
    after_fast = actual.after()
    if after_fast != after_triton:
        wrong = [
            a
            for a in after_triton.keys() | after_fast.keys()
            if after_triton.get(a) != after_fast.get(a)
        ]
        raise AssertionError(
            f"{kernel.fn.__module__}.{kernel.fn.__name__}, grid {grid}: {len(wrong)} of {len(after_triton)} bytes "
            f"written by Triton's interpreter differ, first at {min(wrong):#x}"
        )


# compares bf16 logits, which Triton's interpreter does on their bits taken as integers
NOT_COMPARABLE = {"_ranks_kernel"}


@contextlib.contextmanager
def every_launch():
    """Within the context every launch is compared; yields the number of launches of each kernel."""
    launches = collections.Counter()

    def run(self, *args, grid, warmup, **kwargs):
        if warmup:
            return
        assert not fast_interpreter.unsupported(self.fn), self.fn
        launches[self.fn.__name__] += 1
        launch = fast_interpreter.run if self.fn.__name__ in NOT_COMPARABLE else launch_twice
        launch(self, *args, grid=grid, **kwargs)

    with mock.patch.object(triton_interpreter.InterpretedFunction, "run", run):
        yield launches
