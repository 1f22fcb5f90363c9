# SPDX-License-Identifier: Apache-2.0
"""A small interpreter for Triton kernels on CPU tensors: NumPy values, and none of Triton's own type machinery.

Triton's interpreter spends about 30 us per operation on types and wrappers, so a decoding round of vLLM's Model
Runner V2 takes seconds. Here an operation is one NumPy call. The kernel's source stays the only definition of what
is computed: its function runs with `tl` standing for `Language` below. Promotion rules, integer division, reductions
and bit patterns are those of Triton's interpreter; test_fast_interpreter.py compares every store of the two.
"""

import builtins
import ctypes
import functools
import inspect
import operator
import types

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, _interpreter
from triton.runtime.jit import mangle_type


class _Element:
    """A Triton type: how it is computed with (`dtype`) and what lies in memory (`memory`, `c_type`)."""

    __slots__ = ("name", "dtype", "memory", "c_type", "size")

    def __init__(self, name, dtype, c_type=None, memory=None):
        self.name = name
        self.dtype = np.dtype(dtype)
        self.memory = np.dtype(memory or dtype)
        # None: a scalar is accessed like a block
        self.c_type = c_type
        self.size = self.memory.itemsize


_ELEMENTS = {
    element.name: element
    for element in (
        _Element(tl.int1, bool, ctypes.c_bool, memory=np.int8),
        _Element(tl.int8, np.int8, ctypes.c_int8),
        _Element(tl.int16, np.int16, ctypes.c_int16),
        _Element(tl.int32, np.int32, ctypes.c_int32),
        _Element(tl.int64, np.int64, ctypes.c_int64),
        _Element(tl.uint8, np.uint8, ctypes.c_uint8),
        _Element(tl.uint16, np.uint16, ctypes.c_uint16),
        _Element(tl.uint32, np.uint32, ctypes.c_uint32),
        _Element(tl.uint64, np.uint64, ctypes.c_uint64),
        _Element(tl.float16, np.float16),
        _Element(tl.bfloat16, np.uint16),
        _Element(tl.float32, np.float32, ctypes.c_float),
        _Element(tl.float64, np.float64, ctypes.c_double),
    )
}
_BFLOAT16 = _ELEMENTS[tl.bfloat16]
_BOOL = _ELEMENTS[tl.int1]
_TRITON_TYPES = {
    element.dtype: name for name, element in _ELEMENTS.items() if element is not _BFLOAT16
}
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


@functools.cache
def _promote(a, b):
    """The type in which Triton computes with operands of types `a` and `b`."""
    floats = [t for t in (a, b) if t.kind == "f"]
    if floats:
        return max(floats, key=lambda t: t.itemsize)
    rank = {t: 0 if t.kind == "b" else t.itemsize for t in (a, b)}
    signed = [t for t in (a, b) if t.kind == "i"]
    if len(signed) != 1:
        return a if rank[a] > rank[b] else b
    unsigned = b if a.kind == "i" else a
    return unsigned if rank[unsigned] >= rank[signed[0]] else signed[0]


def _typed(number):
    """A Python number as the type that Triton gives it."""
    if isinstance(number, bool):
        return np.bool_(number)
    if isinstance(number, int):
        for dtype, low, high in (
            (np.int32, -(2**31), 2**31),
            (np.uint32, 2**31, 2**32),
            (np.int64, -(2**63), 2**63),
            (np.uint64, 2**63, 2**64),
        ):
            if low <= number < high:
                return dtype(number)
    if isinstance(number, float):
        fits = (
            not np.isfinite(number)
            or number == 0
            or 2**-126 <= abs(number) <= (2 - 2**-23) * 2**127
        )
        return np.float32(number) if fits else np.float64(number)
    raise TypeError(f"a kernel operand is {number!r}")


def _number_for(number, dtype):
    """A Python number beside an operand of type `dtype`: it takes that type unless its own kind is higher."""
    if type(number) is int and dtype.kind in "iuf" or type(number) is float and dtype.kind == "f":
        return dtype.type(number)
    return _typed(number)


def _operands(a, b):
    """`a` and `b` as NumPy values of one type."""
    a_is_tensor, b_is_tensor = type(a) is Tensor, type(b) is Tensor
    if a_is_tensor and b_is_tensor:
        a, b = a.data, b.data
    elif a_is_tensor:
        a, b = a.data, _number_for(b, a.data.dtype)
    elif b_is_tensor:
        a, b = _number_for(a, b.data.dtype), b.data
    else:
        a, b = _typed(a), _typed(b)
    if a.dtype is not b.dtype:
        dtype = _promote(a.dtype, b.dtype)
        a, b = a.astype(dtype), b.astype(dtype)
    return a, b


def _binary(function):
    def method(self, other):
        if type(other) is Tensor and self.data.dtype is other.data.dtype:
            return Tensor(function(self.data, other.data))
        if type(other) is Pointer:
            return NotImplemented
        return Tensor(function(*_operands(self, other)))

    return method


def _reflected(function):
    def method(self, other):
        return Tensor(function(*_operands(other, self)))

    return method


def _comparison(function):
    compare = _binary(function)
    return lambda self, other: compare(_widen(self), _widen(other))


def _widen(value):
    return value.to(tl.float32) if type(value) is BFloat16 else value


def _true_divide(a, b):
    return (
        np.divide(a, b)
        if a.dtype.kind == "f"
        else np.divide(a.astype(_FLOAT32), b.astype(_FLOAT32))
    )


def _floor_divide(a, b):
    # towards zero, as in C
    return (a - np.fmod(a, b)) // b


class Tensor:
    """A scalar or a block of numbers."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    @property
    def dtype(self):
        return _TRITON_TYPES[self.data.dtype]

    @property
    def shape(self):
        return self.data.shape

    def to(self, dtype, bitcast=False):
        if isinstance(dtype, tl.pointer_type):
            return Pointer(self.data.astype(np.int64), _ELEMENTS[dtype.element_ty])
        return _cast(self, _ELEMENTS[dtype], bitcast)

    def reshape(self, *shape):
        return Tensor(self.data.reshape(*shape))

    def __getitem__(self, index):
        return Tensor(self.data[index])

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        if self.data.size != 1:
            raise TypeError("a block used as a condition")
        return bool(self.data)

    __add__, __radd__ = _binary(np.add), _reflected(np.add)
    __sub__, __rsub__ = _binary(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _binary(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _binary(_true_divide), _reflected(_true_divide)
    __floordiv__, __rfloordiv__ = _binary(_floor_divide), _reflected(_floor_divide)
    __mod__, __rmod__ = _binary(np.fmod), _reflected(np.fmod)
    __and__, __rand__ = _binary(np.bitwise_and), _reflected(np.bitwise_and)
    __or__, __ror__ = _binary(np.bitwise_or), _reflected(np.bitwise_or)
    __xor__, __rxor__ = _binary(np.bitwise_xor), _reflected(np.bitwise_xor)
    __lshift__, __rlshift__ = _binary(np.left_shift), _reflected(np.left_shift)
    __rshift__, __rrshift__ = _binary(np.right_shift), _reflected(np.right_shift)
    __lt__, __le__ = _comparison(np.less), _comparison(np.less_equal)
    __gt__, __ge__ = _comparison(np.greater), _comparison(np.greater_equal)
    __eq__, __ne__ = _comparison(np.equal), _comparison(np.not_equal)
    __hash__ = None

    def __neg__(self):
        return Tensor(-self.data)

    def __invert__(self):
        return Tensor(~self.data)


class BFloat16:
    """bf16 as its bits: it can be loaded, stored, compared and converted; arithmetic on it is refused.

    (Triton's interpreter computes with and compares the bits as integers.)
    """

    __slots__ = ("data",)
    dtype = tl.bfloat16
    __lt__, __le__ = _comparison(np.less), _comparison(np.less_equal)
    __gt__, __ge__ = _comparison(np.greater), _comparison(np.greater_equal)
    __eq__, __ne__ = _comparison(np.equal), _comparison(np.not_equal)
    __hash__ = None

    def __init__(self, data):
        self.data = data

    def to(self, dtype, bitcast=False):
        return _cast(self, _ELEMENTS[dtype], bitcast)


def _cast(value, element, bitcast=False):
    if type(value) is BFloat16:
        if element is _BFLOAT16:
            return value
        value = Tensor((np.asarray(value.data, np.uint32) << np.uint32(16)).view(np.float32)[()])
    elif type(value) is not Tensor:
        value = Tensor(_typed(value))
    if element is _BFLOAT16:
        return BFloat16(_round_to_bfloat16(value.data.astype(np.float32)))
    if value.data.dtype is element.dtype:
        return value
    return Tensor(value.data.view(element.dtype) if bitcast else value.data.astype(element.dtype))


def _round_to_bfloat16(data):
    # to nearest, ties to even, as hardware does; Triton's interpreter truncates
    bits = np.asarray(data).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded.astype(np.uint16))


class Pointer:
    """Addresses of elements of one type: an int, or a block of int64. Offsets count elements."""

    __slots__ = ("address", "element")

    def __init__(self, address, element):
        self.address = address if type(address) is np.ndarray else int(address)
        self.element = element

    def __add__(self, offset):
        if type(offset) is Tensor:
            offset = offset.data
            offset = offset.astype(np.int64) if type(offset) is np.ndarray else int(offset)
        return Pointer(self.address + self.element.size * offset, self.element)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset

    def to(self, dtype):
        if isinstance(dtype, tl.pointer_type):
            return Pointer(self.address, _ELEMENTS[dtype.element_ty])
        return Tensor(np.asarray(self.address, np.int64)[()]).to(dtype)


def _block(pointer, mask):
    """Addresses and mask as arrays of at least one dimension."""
    address = np.atleast_1d(np.asarray(pointer.address, np.int64))
    if mask is None:
        return address.view(np.uint64), np.ones(address.shape, bool)
    mask = np.asarray(mask.data if type(mask) is Tensor else mask, bool)
    return address.view(np.uint64), np.broadcast_to(mask, address.shape)


def load(pointer, mask=None, other=None, cache_modifier="", eviction_policy="", volatile=False):
    element, is_scalar = pointer.element, type(pointer.address) is int
    if is_scalar and element.c_type is not None:
        if mask is None or mask:
            return Tensor(element.dtype.type(peek(element.c_type, pointer.address)))
        return _cast(0 if other is None else other, element)
    address, mask = _block(pointer, mask)
    other = (
        np.zeros((), element.memory)
        if other is None
        else _cast(other, element).data.astype(element.memory)
    )
    data = gather(address, mask, np.broadcast_to(other, address.shape), element.memory)
    data = data[0] if is_scalar else data
    if element is _BFLOAT16:
        return BFloat16(data)
    return Tensor(data != 0 if element is _BOOL else data)


def store(pointer, value, mask=None, cache_modifier="", eviction_policy=""):
    element = pointer.element
    data = _cast(value, element).data
    if type(pointer.address) is int and element.c_type is not None:
        if mask is None or mask:
            poke(element.c_type, pointer.address, data.item())
        return
    address, mask = _block(pointer, mask)
    scatter(address, np.broadcast_to(data.astype(element.memory), address.shape), mask)


# every access to memory ends in one of these five


def peek(c_type, address):
    return c_type.from_address(address).value


def poke(c_type, address, value):
    c_type.from_address(address).value = value


def gather(address, mask, other, dtype):
    return _interpreter.load(address, mask, other, dtype)


def scatter(address, data, mask):
    _interpreter.store(address, data, mask)


def atomic(operation, address, data, mask):
    return _interpreter.atomic_rmw(
        operation, address, data, mask, _interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE
    )


def _atomic(operation):
    def method(pointer, value, mask=None, sem=None, scope=None):
        address, mask = _block(pointer, mask)
        # the function behind reads the values as if they were contiguous
        data = np.ascontiguousarray(
            np.broadcast_to(_cast(value, pointer.element).data, address.shape)
        )
        return Tensor(atomic(operation, address, data, mask).reshape(np.shape(pointer.address)))

    return method


def _scalar(value):
    return value.data if type(value) is Tensor else _typed(value)


def _unary(function):
    return lambda x: Tensor(function(_scalar(x)))


def _binary_function(function):
    # unlike an operator, these give a Python number its own type first
    return lambda x, y: Tensor(
        function(*_operands(_widen(Language.to_tensor(x)), _widen(Language.to_tensor(y))))
    )


def _extremum(function, indices_function, fold):
    def reduce(
        x, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False
    ):
        data = _widen(x).data
        if return_indices:
            index = indices_function(data, axis=axis, keepdims=keep_dims).astype(_INT32)
            return Tensor(fold(data, axis=axis, keepdims=keep_dims)), Tensor(index)
        if data.dtype.itemsize < 4:
            data = data.astype(_FLOAT32 if data.dtype.kind == "f" else _INT32)
        return Tensor(function.reduce(data, axis=axis, keepdims=keep_dims))

    return reduce


def _for_sum(data, dtype):
    if dtype is not None:
        return data.astype(_ELEMENTS[dtype].dtype)
    if data.dtype.kind in "bu" and data.dtype.itemsize < 4:
        return data.astype(np.uint32)
    return data.astype(_INT32) if data.dtype.kind == "i" and data.dtype.itemsize < 4 else data


class Language:
    """What kernels find under the name `tl`."""

    grid = (1, 1, 1)
    program = (0, 0, 0)

    def program_id(self, axis):
        return Tensor(np.int32(self.program[axis]))

    def num_programs(self, axis):
        return Tensor(np.int32(self.grid[axis]))

    load = staticmethod(load)
    store = staticmethod(store)
    atomic_add = staticmethod(_atomic(_interpreter.RMW_OP.ADD))
    atomic_or = staticmethod(_atomic(_interpreter.RMW_OP.OR))

    constexpr = staticmethod(lambda value: value)
    static_range = range = staticmethod(
        lambda *bounds, **hints: range(*(operator.index(bound) for bound in bounds))
    )
    multiple_of = max_contiguous = max_constancy = staticmethod(lambda x, values: x)
    debug_barrier = staticmethod(lambda: None)

    @staticmethod
    def static_assert(condition, message=""):
        assert condition, message

    @staticmethod
    def to_tensor(x, check_type=True):
        # also what the interpreted source calls on the right-hand side of each assignment
        return Tensor(_typed(x)) if isinstance(x, (bool, int, float)) else x

    cast = staticmethod(lambda x, dtype, bitcast=False: Language.to_tensor(x).to(dtype, bitcast))
    arange = staticmethod(lambda start, end: Tensor(np.arange(start, end, dtype=_INT32)))
    full = staticmethod(
        lambda shape, value, dtype: Tensor(np.full(shape, _cast(value, _ELEMENTS[dtype]).data)[()])
    )
    zeros = staticmethod(lambda shape, dtype: Tensor(np.zeros(shape, _ELEMENTS[dtype].dtype)[()]))
    zeros_like = staticmethod(lambda x: Tensor(np.zeros_like(x.data)))
    reshape = staticmethod(lambda x, *shape: x.reshape(*shape))
    join = staticmethod(lambda x, y: Tensor(np.stack(_operands(x, y), axis=-1)))
    broadcast_to = staticmethod(lambda x, *shape: Tensor(np.broadcast_to(x.data, shape)))
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)

    @staticmethod
    def where(condition, x, y):
        condition = np.asarray(_scalar(condition)).astype(bool)
        return Tensor(np.where(condition, *_operands(x, y))[()])

    maximum = staticmethod(_binary_function(np.maximum))
    minimum = staticmethod(_binary_function(np.minimum))
    max = staticmethod(_extremum(np.fmax, np.argmax, np.max))
    min = staticmethod(_extremum(np.fmin, np.argmin, np.min))
    argmax = staticmethod(lambda x, axis, **options: Language.max(x, axis, True, **options)[1])
    argmin = staticmethod(lambda x, axis, **options: Language.min(x, axis, True, **options)[1])

    @staticmethod
    def sum(x, axis=None, keep_dims=False, dtype=None):
        data = _for_sum(x.data, dtype)
        return Tensor(np.sum(data, axis=axis, keepdims=keep_dims).astype(data.dtype))

    @staticmethod
    def cumsum(x, axis=0, reverse=False, dtype=None):
        data = _for_sum(x.data, dtype)
        data = np.flip(data, axis) if reverse else data
        total = np.cumsum(data, axis=axis).astype(data.dtype)
        return Tensor(np.flip(total, axis) if reverse else total)

    add = staticmethod(lambda x, y, sanitize_overflow=True: Language.to_tensor(x) + y)
    sub = staticmethod(lambda x, y, sanitize_overflow=True: Language.to_tensor(x) - y)
    mul = staticmethod(lambda x, y, sanitize_overflow=True: Language.to_tensor(x) * y)
    div_rn = staticmethod(lambda x, y: Tensor(np.divide(*_operands(x, y))))
    exp, exp2, log, log2 = (staticmethod(_unary(f)) for f in (np.exp, np.exp2, np.log, np.log2))
    sqrt, abs, floor, ceil = (staticmethod(_unary(f)) for f in (np.sqrt, np.abs, np.floor, np.ceil))

    @staticmethod
    def umulhi(x, y):
        x, y = _operands(Language.to_tensor(x), Language.to_tensor(y))
        if x.dtype.itemsize != 4:
            raise TypeError("umulhi of other than 32 bits")
        return Tensor(
            ((x.astype(np.uint64) * y.astype(np.uint64)) >> np.uint64(32)).astype(x.dtype)
        )

    def __getattr__(self, name):
        return _converted_name(getattr(tl, name))


_language = Language()


def _converted_name(value):
    if isinstance(value, InterpretedFunction):
        return _convert(value)
    if isinstance(value, types.ModuleType) and value in (tl, tl.core, tl.math):
        return _language
    return value.value if isinstance(value, tl.constexpr) else value


@functools.cache
def _convert(kernel):
    """The Python function of `kernel` with `Language` for `tl`, and the functions it calls likewise."""
    source = kernel.rewrite()
    names = {"__builtins__": builtins}
    function = types.FunctionType(
        source.__code__, names, source.__name__, source.__defaults__, source.__closure__
    )
    for name in source.__code__.co_names:
        if name in source.__globals__:
            names[name] = _converted_name(source.__globals__[name])
    # the rewritten source passes the right-hand side of each assignment to its `to_tensor`
    names["interpreter_semantic"] = _language
    return function


@functools.cache
def unsupported(kernel_function):
    """The operations that a kernel, or a device function it calls, takes from `tl` and that do not exist here."""
    names, todo, seen = set(), [kernel_function], set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        names.update(function.__code__.co_names)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, getattr(tl, name, None))
            if isinstance(value, InterpretedFunction) and not hasattr(Language, name):
                todo.append(value.fn)
    operations = (name for name in names if tl.core.is_builtin(getattr(tl, name, None)))
    return sorted(name for name in operations if not hasattr(Language, name))


_element_of_torch_type = {}


def _argument(value):
    if hasattr(value, "data_ptr"):
        if value.dtype not in _element_of_torch_type:
            pointer_type = tl.str_to_ty(mangle_type(value), None)
            _element_of_torch_type[value.dtype] = _ELEMENTS[pointer_type.element_ty]
        return Pointer(value.data_ptr(), _element_of_torch_type[value.dtype])
    return Language.to_tensor(value) if isinstance(value, int) else value


@functools.cache
def _constants(function):
    return {name for name, hint in function.__annotations__.items() if "constexpr" in str(hint)}


def run(kernel, *args, grid, **kwargs):
    """Launch an `InterpretedFunction`; tensors among the arguments are in CPU memory."""
    kwargs = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    arguments = inspect.getcallargs(kernel.fn, *args, **kwargs)
    grid = grid(arguments) if callable(grid) else grid
    constants = _constants(kernel.fn)
    arguments = {
        name: value if name in constants else _argument(value) for name, value in arguments.items()
    }
    function = _convert(kernel)
    _language.grid = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for program in np.ndindex(_language.grid):
            _language.program = program
            function(**arguments)
