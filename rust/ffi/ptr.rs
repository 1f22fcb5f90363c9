// SPDX-License-Identifier: Apache-2.0
//! Checked access to caller memory: versioned structs, arrays, tensors and tree fields.

#[cfg(feature = "cuda")]
use std::ffi::c_void;
use std::mem::MaybeUninit;

use super::types::{ddt_tensor, ddt_tree};
use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::tensor::{MAX_NDIM, TensorMut, TensorRef};
use crate::tree::{MAX_DEPTH, MAX_NODE_BUDGET};

/// A struct larger than this is taken for a mistake, so that a wild struct_size reads nothing.
const MAX_STRUCT_SIZE: usize = 4096;

/// A parameter struct that starts with `uint32_t struct_size`.
///
/// # Safety
/// The type must be `repr(C)`, start with that field, have no padding, and be valid when all
/// bytes are zero.
pub(crate) unsafe trait Versioned: Copy {
    /// Smallest size accepted: the end of the last field that has no "absent" value.
    const MIN_SIZE: usize;
}

/// Copies a versioned struct. Fields beyond a smaller struct_size read as zero; a larger one is
/// accepted if this version would not miss anything, that is if the rest is zero.
///
/// # Safety
/// `params` must be NULL, or readable for a `u32` and for as many bytes as that number says.
pub(crate) unsafe fn versioned<T: Versioned>(params: *const T, name: &str) -> Result<T> {
    check_pointer(params, name)?;
    let bytes = params.cast::<u8>();
    // SAFETY: not NULL, aligned for T, and readable for its first field.
    let size = unsafe { bytes.cast::<u32>().read() } as usize;
    let known = size_of::<T>();
    if size < T::MIN_SIZE || size > MAX_STRUCT_SIZE || !size.is_multiple_of(align_of::<T>()) {
        bail!(
            InvalidStruct,
            "{name}.struct_size: got {size}, want {known} (from {} on, a multiple of {})",
            T::MIN_SIZE,
            align_of::<T>()
        );
    }
    // SAFETY: the caller vouches for `size` bytes.
    let tail = unsafe { std::slice::from_raw_parts(bytes.add(known.min(size)), size.saturating_sub(known)) };
    if tail.iter().any(|&byte| byte != 0) {
        bail!(
            Unsupported,
            "{name}.struct_size: got {size} with values set beyond byte {known}, want those zero: this library is older than the caller"
        );
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: both ranges hold min(size, known) bytes, and T is valid for any such contents.
    unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes, known.min(size));
        Ok(copy.assume_init())
    }
}

/// Refuses flag bits that this version does not know.
pub(crate) fn no_flags(flags: u32) -> Result<()> {
    if flags != 0 {
        bail!(Unsupported, "params.flags: got {flags:#x}, want 0");
    }
    Ok(())
}

fn check_pointer<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() {
        bail!(NullPointer, "{name}: got NULL, want a pointer");
    }
    if !pointer.is_aligned() {
        bail!(Misaligned, "{name}: got address {pointer:p}, want a multiple of {}", align_of::<T>());
    }
    Ok(())
}

/// Checks pointer and size of an array of `len` elements; NULL is fine for an empty one.
fn check_array<T>(pointer: *const T, len: usize, name: &str) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    check_pointer(pointer, name)?;
    let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
    if bytes.and_then(|bytes| (pointer as usize).checked_add(bytes)).is_none() {
        bail!(InvalidShape, "{name} length: got {len}, want one that memory can hold");
    }
    Ok(())
}

/// A required input array.
///
/// # Safety
/// `pointer` must be NULL or readable for `len` elements that nobody writes while the slice lives.
pub(crate) unsafe fn input<'a, T: Copy>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    check_array(pointer, len, name)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: checked above, the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// An input array that may be absent (NULL).
///
/// # Safety
/// As for [`input`].
pub(crate) unsafe fn optional_input<'a, T: Copy>(
    pointer: *const T,
    len: usize,
    name: &str,
) -> Result<Option<&'a [T]>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { input(pointer, len, name) }.map(Some)
}

/// An output array: write-only, so it may hold anything and may overlap inputs that have been
/// read already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<T> {
    pointer: *mut T,
    len: usize,
}

impl<T: Copy> Output<T> {
    /// Writes element `i`. Panics outside of the array.
    pub(crate) fn write(&mut self, i: usize, value: T) {
        assert!(i < self.len, "output index {i} of {}", self.len);
        // SAFETY: inside of the array that `output` was promised.
        unsafe { self.pointer.add(i).write(value) };
    }

    /// Writes `value` to elements `start..end`. Panics outside of the array.
    pub(crate) fn fill(&mut self, start: usize, end: usize, value: T) {
        for i in start..end {
            self.write(i, value);
        }
    }

    /// Writes `values` to elements `start..start + len` and `padding` to those that are left.
    /// Panics outside of the array, or with more values than elements.
    pub(crate) fn write_row(
        &mut self,
        start: usize,
        len: usize,
        values: impl Iterator<Item = T>,
        padding: T,
    ) {
        let mut i = start;
        for value in values {
            assert!(i < start + len, "more than {len} values for a row");
            self.write(i, value);
            i += 1;
        }
        self.fill(i, start + len, padding);
    }
}

impl Output<u32> {
    /// Sets bits of element `i`, which the caller has initialised. Panics outside of the array.
    pub(crate) fn set_bits(&mut self, i: usize, bits: u32) {
        assert!(i < self.len, "output index {i} of {}", self.len);
        // SAFETY: inside of the array that `output` was promised.
        unsafe { *self.pointer.add(i) |= bits };
    }
}

/// A required array on a GPU: checked like [`input`], but nothing is read.
#[cfg(feature = "cuda")]
pub(crate) fn device_array<T>(pointer: *const T, len: usize, name: &str) -> Result<*const T> {
    check_array(pointer, len, name)?;
    Ok(pointer)
}

/// An array on a GPU that may be absent (NULL).
#[cfg(feature = "cuda")]
pub(crate) fn optional_device_array<T>(pointer: *const T, len: usize, name: &str) -> Result<*const T> {
    if pointer.is_null() { Ok(pointer) } else { device_array(pointer, len, name) }
}

/// A required output array on a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn device_output<T>(pointer: *mut T, len: usize, name: &str) -> Result<*mut T> {
    check_array(pointer, len, name)?;
    Ok(pointer)
}

/// An output array on a GPU that may be absent (NULL).
#[cfg(feature = "cuda")]
pub(crate) fn optional_device_output<T>(pointer: *mut T, len: usize, name: &str) -> Result<*mut T> {
    if pointer.is_null() { Ok(pointer) } else { device_output(pointer, len, name) }
}

/// Alignment of workspaces.
#[cfg(feature = "cuda")]
const WORKSPACE_ALIGNMENT: usize = 256;

/// The caller's workspace, NULL if none is needed.
#[cfg(feature = "cuda")]
pub(crate) fn workspace(pointer: *mut c_void, bytes: usize, needed: usize) -> Result<*mut c_void> {
    if needed == 0 {
        return Ok(std::ptr::null_mut());
    }
    if pointer.is_null() {
        bail!(NullPointer, "workspace: got NULL, want a pointer to {needed} bytes");
    }
    if !(pointer as usize).is_multiple_of(WORKSPACE_ALIGNMENT) {
        bail!(Misaligned, "workspace: got address {pointer:p}, want a multiple of {WORKSPACE_ALIGNMENT}");
    }
    if bytes < needed {
        bail!(WorkspaceTooSmall, "workspace_bytes: got {bytes}, want {needed}");
    }
    Ok(pointer)
}

/// A required output array.
///
/// # Safety
/// `pointer` must be NULL or writable for `len` elements until the call ends.
pub(crate) unsafe fn output<T: Copy>(pointer: *mut T, len: usize, name: &str) -> Result<Output<T>> {
    check_array(pointer, len, name)?;
    Ok(Output { pointer, len })
}

/// An output array that may be absent (NULL).
///
/// # Safety
/// As for [`output`].
pub(crate) unsafe fn optional_output<T: Copy>(
    pointer: *mut T,
    len: usize,
    name: &str,
) -> Result<Option<Output<T>>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { output(pointer, len, name) }.map(Some)
}

/// Whether the caller left a tensor out.
pub(crate) fn is_absent(tensor: &ddt_tensor) -> bool {
    tensor.data.is_null() && tensor.dtype == 0
}

/// Checks what a raw tensor says about itself; returns its dtype.
fn check_tensor(tensor: &ddt_tensor, ndim: usize, name: &str) -> Result<DType> {
    if is_absent(tensor) {
        bail!(
            NullPointer,
            "{name}: got an absent tensor (data NULL, dtype 0), want one of {ndim} dimensions"
        );
    }
    let Some(dtype) = DType::from_abi(tensor.dtype) else {
        bail!(InvalidDtype, "{name} dtype: got number {}, want 1..=6 (DDT_DTYPE_*)", tensor.dtype);
    };
    if tensor.ndim as usize != ndim || ndim > MAX_NDIM {
        bail!(InvalidShape, "{name} ndim: got {}, want {ndim}", tensor.ndim);
    }
    Ok(dtype)
}

/// A required input tensor of `ndim` dimensions.
///
/// # Safety
/// Its elements must be readable, and nobody may write them while the view lives.
pub(crate) unsafe fn tensor<'a>(tensor: &ddt_tensor, ndim: usize, name: &str) -> Result<TensorRef<'a>> {
    let dtype = check_tensor(tensor, ndim, name)?;
    // SAFETY: the caller's promise.
    unsafe {
        TensorRef::from_raw(name, tensor.data.cast(), dtype, &tensor.shape[..ndim], &tensor.strides[..ndim])
    }
}

/// An input tensor that may be absent.
///
/// # Safety
/// As for [`tensor`].
pub(crate) unsafe fn optional_tensor<'a>(
    raw: &ddt_tensor,
    ndim: usize,
    name: &str,
) -> Result<Option<TensorRef<'a>>> {
    if is_absent(raw) {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { tensor(raw, ndim, name) }.map(Some)
}

/// A required output (or in-out) tensor of `ndim` dimensions.
///
/// # Safety
/// Its elements must be writable, and nobody else may use them while the view lives.
pub(crate) unsafe fn tensor_mut<'a>(tensor: &ddt_tensor, ndim: usize, name: &str) -> Result<TensorMut<'a>> {
    let dtype = check_tensor(tensor, ndim, name)?;
    // SAFETY: the caller's promise.
    unsafe {
        TensorMut::from_raw(name, tensor.data.cast(), dtype, &tensor.shape[..ndim], &tensor.strides[..ndim])
    }
}

/// Answers a size query with `bytes(&params)`.
///
/// # Safety
/// `params` as for [`versioned`]; `out` must be NULL or writable.
pub(crate) unsafe fn workspace_size<T: Versioned>(
    params: *const T,
    out: *mut usize,
    bytes: impl FnOnce(&T) -> Result<usize>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let params = versioned(params, "params")?;
        let mut out = output(out, 1, "out")?;
        out.write(0, bytes(&params)?);
    }
    Ok(())
}

/// The checked extents of a `ddt_tree`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeDims {
    /// Requests, R.
    pub(crate) num_reqs: usize,
    /// Row length with the root, N.
    pub(crate) max_nodes: usize,
    /// Largest depth, D.
    pub(crate) max_depth: usize,
}

impl TreeDims {
    /// Length of the `[R][N]` fields.
    pub(crate) fn num_slots(&self) -> usize {
        self.num_reqs * self.max_nodes
    }

    /// Words of one row of ancestor_bits, W.
    pub(crate) fn words(&self) -> usize {
        self.max_nodes.div_ceil(32)
    }

    /// Length of ancestor_bits, `[R][N][W]`.
    pub(crate) fn bits_len(&self) -> usize {
        self.num_slots() * self.words()
    }

    /// Length of ancestors, `[R][N][D + 1]`.
    pub(crate) fn ancestors_len(&self) -> usize {
        self.num_slots() * (self.max_depth + 1)
    }
}

/// The num_nodes of the tree `name` that an operation reads: `[R]`, each 0 to N.
///
/// # Safety
/// As for [`input`].
pub(crate) unsafe fn num_nodes<'a>(tree: &ddt_tree, dims: TreeDims, name: &str) -> Result<&'a [i32]> {
    // SAFETY: the caller's promise.
    let num_nodes = unsafe { input(tree.num_nodes, dims.num_reqs, &format!("{name}.num_nodes")) }?;
    for (r, &count) in num_nodes.iter().enumerate() {
        if count < 0 || count as usize > dims.max_nodes {
            bail!(
                InvalidValue,
                "{name}.num_nodes[{r}]: got {count}, want 0..={} (max_nodes)",
                dims.max_nodes
            );
        }
    }
    Ok(num_nodes)
}

/// Copies a `ddt_tree` and checks its extents; the fields' pointers are checked by whoever uses
/// them, with the lengths of [`TreeDims`].
///
/// # Safety
/// As for [`versioned`].
pub(crate) unsafe fn tree(tree: *const ddt_tree, name: &str) -> Result<(ddt_tree, TreeDims)> {
    // SAFETY: the caller's promise.
    let tree = unsafe { versioned(tree, name) }?;
    if tree.num_reqs < 0 {
        bail!(InvalidShape, "{name}.num_reqs: got {}, want >= 0", tree.num_reqs);
    }
    if !(1..=MAX_NODE_BUDGET as i32 + 1).contains(&tree.max_nodes) {
        bail!(InvalidShape, "{name}.max_nodes: got {}, want 1..={}", tree.max_nodes, MAX_NODE_BUDGET + 1);
    }
    if !(0..=MAX_DEPTH as i32).contains(&tree.max_depth) {
        bail!(InvalidShape, "{name}.max_depth: got {}, want 0..={MAX_DEPTH}", tree.max_depth);
    }
    let dims = TreeDims {
        num_reqs: tree.num_reqs as usize,
        max_nodes: tree.max_nodes as usize,
        max_depth: tree.max_depth as usize,
    };
    Ok((tree, dims))
}
