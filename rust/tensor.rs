// SPDX-License-Identifier: Apache-2.0
//! Strided views over caller memory: the only place that turns shapes and strides into addresses.
//!
//! A view is checked once, when it is made: extents and strides are not negative, no offset
//! overflows, data is aligned. After that an index inside of the shape is inside of the memory.

use std::marker::PhantomData;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{Result, bail};

/// Most dimensions a tensor can have.
pub const MAX_NDIM: usize = 4;

/// Rust types that can be the elements of a tensor.
pub trait Element: Copy + sealed::Sealed {
    /// The matching [`DType`].
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {
        $(impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}
element!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, i64 => I64, u8 => U8);

/// Shape and strides (in elements) of a view.
#[derive(Clone, Copy, Debug)]
struct Layout {
    dtype: DType,
    ndim: usize,
    shape: [usize; MAX_NDIM],
    strides: [usize; MAX_NDIM],
}

impl Layout {
    /// Checks extents and strides; the second value is the number of bytes the view spans.
    fn new(name: &str, dtype: DType, shape: &[i64], strides: &[i64]) -> Result<(Self, usize)> {
        if shape.len() != strides.len() || shape.len() > MAX_NDIM {
            bail!(
                InvalidShape,
                "{name} dimensions: got {} extents and {} strides, want the same number, at most {MAX_NDIM}",
                shape.len(),
                strides.len()
            );
        }
        let mut layout = Self { dtype, ndim: shape.len(), shape: [1; MAX_NDIM], strides: [0; MAX_NDIM] };
        let mut last = Some(0i64);
        let mut is_empty = false;
        for (axis, (&extent, &stride)) in shape.iter().zip(strides).enumerate() {
            if extent < 0 {
                bail!(InvalidShape, "{name} shape[{axis}]: got {extent}, want >= 0");
            }
            if stride < 0 {
                bail!(InvalidShape, "{name} strides[{axis}]: got {stride}, want >= 0");
            }
            is_empty |= extent == 0;
            last = (extent - 1)
                .max(0)
                .checked_mul(stride)
                .and_then(|offset| last.and_then(|sum| sum.checked_add(offset)));
            layout.shape[axis] = extent as usize;
            layout.strides[axis] = stride as usize;
        }
        if is_empty {
            // nothing can be indexed, so no offset may overflow either
            layout.strides = [0; MAX_NDIM];
            return Ok((layout, 0));
        }
        let bytes = last
            .and_then(|last| last.checked_add(1))
            .and_then(|elements| elements.checked_mul(dtype.size() as i64))
            .and_then(|bytes| isize::try_from(bytes).ok());
        match bytes {
            Some(bytes) => Ok((layout, bytes as usize)),
            None => bail!(
                InvalidShape,
                "{name} extent in memory: got shape {shape:?} with strides {strides:?}, want less than 2^63 bytes"
            ),
        }
    }

    /// Element offset of `index`.
    ///
    /// # Panics
    /// If `index` lies outside of the shape, as slice indexing does.
    #[inline]
    fn offset(&self, index: &[usize]) -> usize {
        assert_eq!(index.len(), self.ndim, "index has the wrong number of dimensions");
        let mut offset = 0;
        for (axis, &i) in index.iter().enumerate() {
            assert!(i < self.shape[axis], "index {i} is outside of axis {axis}");
            offset += i * self.strides[axis];
        }
        offset
    }

    /// The layout without its leading axis, and the offset of entry `i` of that axis.
    #[inline]
    fn at(&self, i: usize) -> (Self, usize) {
        assert!(self.ndim > 0 && i < self.shape[0], "index {i} is outside of axis 0");
        let mut rest = Self { ndim: self.ndim - 1, shape: [1; MAX_NDIM], strides: [0; MAX_NDIM], ..*self };
        rest.shape[..MAX_NDIM - 1].copy_from_slice(&self.shape[1..]);
        rest.strides[..MAX_NDIM - 1].copy_from_slice(&self.strides[1..]);
        (rest, i * self.strides[0])
    }

    /// The layout of a matrix with its two axes exchanged.
    fn transposed(&self) -> Self {
        assert_eq!(self.ndim, 2, "only a matrix can be transposed");
        let mut layout = *self;
        layout.shape.swap(0, 1);
        layout.strides.swap(0, 1);
        layout
    }

    /// Checks that this is a vector with elements `start..start + len`; returns its stride.
    #[inline]
    fn span(&self, start: usize, len: usize) -> usize {
        assert_eq!(self.ndim, 1, "only vectors can be loaded or stored");
        assert!(
            start <= self.shape[0] && len <= self.shape[0] - start,
            "elements {start}..{start}+{len} are outside of a vector of {}",
            self.shape[0]
        );
        self.strides[0]
    }
}

/// A read-only strided view of up to four dimensions.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    layout: Layout,
    data: *const u8,
    memory: PhantomData<&'a [u8]>,
}

/// A writable strided view of up to four dimensions.
#[derive(Debug)]
pub struct TensorMut<'a> {
    layout: Layout,
    data: *mut u8,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a TensorRef only reads plain numbers, like the &[u8] it stands for.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a TensorMut is as exclusive as the &mut [u8] it stands for.
unsafe impl Send for TensorMut<'_> {}

/// Checks a NULL, misaligned or wrapping pointer under a view of `bytes` bytes.
fn check_data(name: &str, data: *const u8, dtype: DType, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    if data.is_null() {
        bail!(NullPointer, "{name} data: got NULL, want {} elements", dtype.name());
    }
    if !(data as usize).is_multiple_of(dtype.size()) {
        bail!(
            Misaligned,
            "{name} data: got address {data:p}, want a multiple of {} for {}",
            dtype.size(),
            dtype.name()
        );
    }
    if (data as usize).checked_add(bytes).is_none() {
        bail!(InvalidShape, "{name} extent in memory: got {bytes} bytes at {data:p}, want an end below 2^64");
    }
    Ok(())
}

/// Row-major strides of `shape`; saturates, because the layout check refuses what overflows.
fn contiguous(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis] as i64);
    }
    strides
}

fn extents(shape: &[usize]) -> Result<Vec<i64>> {
    match shape.iter().map(|&extent| i64::try_from(extent)).collect() {
        Ok(extents) => Ok(extents),
        Err(_) => bail!(InvalidShape, "tensor shape: got {shape:?}, want extents below 2^63"),
    }
}

impl<'a> TensorRef<'a> {
    /// Views memory that the caller describes; `name` is for the message of an error.
    ///
    /// # Safety
    /// Every element that shape and strides (in elements) address must be readable for `'a`
    /// and nobody may write it meanwhile.
    pub unsafe fn from_raw(
        name: &str,
        data: *const u8,
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Self> {
        let (layout, bytes) = Layout::new(name, dtype, shape, strides)?;
        check_data(name, data, dtype, bytes)?;
        Ok(Self { layout, data, memory: PhantomData })
    }

    /// Views a slice as a row-major tensor of `shape`.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::with_strides(data, shape, &contiguous(shape))
    }

    /// Views a slice with explicit strides, in elements.
    pub fn with_strides<T: Element>(data: &'a [T], shape: &[usize], strides: &[i64]) -> Result<Self> {
        let (layout, bytes) = Layout::new("tensor", T::DTYPE, &extents(shape)?, strides)?;
        if bytes > size_of_val(data) {
            bail!(InvalidShape, "tensor slice: got {} bytes, want {bytes}", size_of_val(data));
        }
        Ok(Self { layout, data: data.as_ptr().cast(), memory: PhantomData })
    }

    /// First element.
    #[cfg(feature = "cuda")]
    pub(crate) fn data(&self) -> *const u8 {
        self.data
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape[..self.layout.ndim]
    }

    /// Distances between neighbours along each axis, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.layout.strides[..self.layout.ndim]
    }

    /// Fails with `InvalidShape` unless there are `want` dimensions.
    pub fn want_ndim(&self, name: &str, want: usize) -> Result<()> {
        want_ndim(&self.layout, name, want)
    }

    /// Fails with `InvalidShape` unless the extents are those of `want`.
    pub fn want_shape(&self, name: &str, want: &[usize]) -> Result<()> {
        want_shape(&self.layout, name, want)
    }

    /// Fails with `InvalidShape` unless axis `axis` has the extent `want`, which `what` names.
    pub fn want_dim(&self, name: &str, axis: usize, want: usize, what: &str) -> Result<()> {
        want_dim(&self.layout, name, axis, want, what)
    }

    /// Fails with `InvalidDtype` unless the element type is one of `want`.
    pub fn want_dtype(&self, name: &str, want: &[DType]) -> Result<()> {
        want_dtype(&self.layout, name, want)
    }

    /// Entry `i` of the leading axis, with one dimension less. Panics outside of the shape.
    #[inline]
    pub fn at(&self, i: usize) -> TensorRef<'a> {
        let (layout, offset) = self.layout.at(i);
        TensorRef { layout, data: self.element(offset), memory: PhantomData }
    }

    /// A matrix with its two axes exchanged. Panics unless there are two.
    #[inline]
    pub fn transposed(&self) -> TensorRef<'a> {
        TensorRef { layout: self.layout.transposed(), ..*self }
    }

    /// The f32 value at `index`; f16 and bf16 are widened. Panics outside of the shape.
    #[inline]
    pub fn get_f32(&self, index: &[usize]) -> f32 {
        let source = self.element(self.layout.offset(index));
        // SAFETY: the index was checked, so the element lies in the view's memory.
        unsafe {
            match self.layout.dtype {
                DType::F32 => source.cast::<f32>().read(),
                DType::F16 => source.cast::<f16>().read().to_f32(),
                DType::BF16 => source.cast::<bf16>().read().to_f32(),
                other => unreachable!("get_f32 of {}", other.name()),
            }
        }
    }

    /// The i32 value at `index`. Panics outside of the shape.
    #[inline]
    pub fn get_i32(&self, index: &[usize]) -> i32 {
        assert_eq!(self.layout.dtype, DType::I32);
        // SAFETY: the index was checked, so the element lies in the view's memory.
        unsafe { self.element(self.layout.offset(index)).cast::<i32>().read() }
    }

    /// The i32 or i64 value at `index`. Panics outside of the shape.
    #[inline]
    pub fn get_i64(&self, index: &[usize]) -> i64 {
        let source = self.element(self.layout.offset(index));
        // SAFETY: the index was checked, so the element lies in the view's memory.
        unsafe {
            match self.layout.dtype {
                DType::I32 => source.cast::<i32>().read().into(),
                DType::I64 => source.cast::<i64>().read(),
                other => unreachable!("get_i64 of {}", other.name()),
            }
        }
    }

    /// Widens elements `start..start + out.len()` of a floating-point vector to f32.
    /// Panics if that leaves the vector.
    #[inline]
    pub fn load_f32(&self, start: usize, out: &mut [f32]) {
        let stride = self.layout.span(start, out.len());
        if out.is_empty() {
            return;
        }
        let source = self.element(start * stride);
        // SAFETY: `span` checked the range, so `out.len()` elements `stride` apart are readable.
        unsafe {
            match self.layout.dtype {
                DType::F32 => {
                    load(source.cast::<f32>(), stride, out, |run, out| out.copy_from_slice(run), |x| x)
                }
                DType::F16 => load(
                    source.cast::<f16>(),
                    stride,
                    out,
                    |run, out| run.convert_to_f32_slice(out),
                    f16::to_f32,
                ),
                DType::BF16 => load(
                    source.cast::<bf16>(),
                    stride,
                    out,
                    |run, out| run.convert_to_f32_slice(out),
                    bf16::to_f32,
                ),
                other => unreachable!("load_f32 of {}", other.name()),
            }
        }
    }

    /// Copies the elements of a whole vector, unconverted, to `out` (`len * dtype.size()` bytes).
    /// Panics if the sizes differ.
    pub fn load_bytes(&self, out: &mut [u8]) {
        let size = self.layout.dtype.size();
        let stride = self.layout.span(0, self.layout.shape[0]) * size;
        assert_eq!(out.len(), self.layout.shape[0] * size, "byte count of the vector");
        if stride == size && !out.is_empty() {
            // SAFETY: `span` checked the range, and the elements are adjacent.
            unsafe { self.data.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
            return;
        }
        for (i, element) in out.chunks_exact_mut(size).enumerate() {
            // SAFETY: `span` checked the range and `element` is `size` bytes of other memory.
            unsafe { self.data.add(i * stride).copy_to_nonoverlapping(element.as_mut_ptr(), size) };
        }
    }

    #[inline]
    fn element(&self, offset: usize) -> *const u8 {
        self.data.wrapping_add(offset * self.layout.dtype.size())
    }
}

/// Reads `out.len()` elements `stride` apart.
///
/// # Safety
/// All of them must be readable.
#[inline]
unsafe fn load<T: Copy>(
    source: *const T,
    stride: usize,
    out: &mut [f32],
    convert_run: impl FnOnce(&[T], &mut [f32]),
    convert: impl Fn(T) -> f32,
) {
    if stride == 1 {
        // SAFETY: the caller vouches for `out.len()` adjacent elements.
        convert_run(unsafe { std::slice::from_raw_parts(source, out.len()) }, out);
    } else {
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: element `i` is one of those the caller vouches for.
            *out = convert(unsafe { source.add(i * stride).read() });
        }
    }
}

impl<'a> TensorMut<'a> {
    /// Views memory that the caller describes; `name` is for the message of an error. A stride
    /// of zero over more than one entry is refused, because writes would overlap.
    ///
    /// # Safety
    /// Every element that shape and strides (in elements) address must be writable for `'a` and
    /// nobody else may use it meanwhile.
    pub unsafe fn from_raw(
        name: &str,
        data: *mut u8,
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Self> {
        let (layout, bytes) = Layout::new(name, dtype, shape, strides)?;
        check_data(name, data, dtype, bytes)?;
        check_distinct(name, &layout)?;
        Ok(Self { layout, data, memory: PhantomData })
    }

    /// Views a slice as a row-major tensor of `shape`.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::with_strides(data, shape, &contiguous(shape))
    }

    /// Views a slice with explicit strides, in elements.
    pub fn with_strides<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[i64]) -> Result<Self> {
        let (layout, bytes) = Layout::new("tensor", T::DTYPE, &extents(shape)?, strides)?;
        if bytes > size_of_val(data) {
            bail!(InvalidShape, "tensor slice: got {} bytes, want {bytes}", size_of_val(data));
        }
        check_distinct("tensor", &layout)?;
        Ok(Self { layout, data: data.as_mut_ptr().cast(), memory: PhantomData })
    }

    /// The same memory, read-only.
    #[inline]
    pub fn view(&self) -> TensorRef<'_> {
        TensorRef { layout: self.layout, data: self.data, memory: PhantomData }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape[..self.layout.ndim]
    }

    /// Distances between neighbours along each axis, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.layout.strides[..self.layout.ndim]
    }

    /// Fails with `InvalidShape` unless there are `want` dimensions.
    pub fn want_ndim(&self, name: &str, want: usize) -> Result<()> {
        want_ndim(&self.layout, name, want)
    }

    /// Fails with `InvalidShape` unless the extents are those of `want`.
    pub fn want_shape(&self, name: &str, want: &[usize]) -> Result<()> {
        want_shape(&self.layout, name, want)
    }

    /// Fails with `InvalidShape` unless axis `axis` has the extent `want`, which `what` names.
    pub fn want_dim(&self, name: &str, axis: usize, want: usize, what: &str) -> Result<()> {
        want_dim(&self.layout, name, axis, want, what)
    }

    /// Fails with `InvalidDtype` unless the element type is one of `want`.
    pub fn want_dtype(&self, name: &str, want: &[DType]) -> Result<()> {
        want_dtype(&self.layout, name, want)
    }

    /// Entry `i` of the leading axis, with one dimension less. Panics outside of the shape.
    #[inline]
    pub fn at(&mut self, i: usize) -> TensorMut<'_> {
        let (layout, offset) = self.layout.at(i);
        let data = self.data.wrapping_add(offset * layout.dtype.size());
        TensorMut { layout, data, memory: PhantomData }
    }

    /// A matrix with its two axes exchanged. Panics unless there are two.
    #[inline]
    pub fn transposed(self) -> TensorMut<'a> {
        TensorMut { layout: self.layout.transposed(), ..self }
    }

    /// Adds `value` to the i64 element at `index`, wrapping around. Panics outside of the shape.
    #[inline]
    pub fn add_i64(&mut self, index: &[usize], value: i64) {
        assert_eq!(self.layout.dtype, DType::I64);
        let target = self.data.wrapping_add(self.layout.offset(index) * size_of::<i64>()).cast::<i64>();
        // SAFETY: the index was checked, so the element lies in the view's memory.
        unsafe { target.write(target.read().wrapping_add(value)) };
    }

    /// Rounds `values` (half to even) to elements `start..start + values.len()` of a
    /// floating-point vector. Panics if that leaves the vector.
    #[inline]
    pub fn store_f32(&mut self, start: usize, values: &[f32]) {
        let stride = self.layout.span(start, values.len());
        let target = self.data.wrapping_add(start * stride * self.layout.dtype.size());
        // SAFETY: `span` checked the range, so `values.len()` elements `stride` apart are writable.
        unsafe {
            match self.layout.dtype {
                DType::F32 => store(target.cast::<f32>(), stride, values, |x| x),
                DType::F16 => store(target.cast::<f16>(), stride, values, f16::from_f32),
                DType::BF16 => store(target.cast::<bf16>(), stride, values, bf16::from_f32),
                other => unreachable!("store_f32 to {}", other.name()),
            }
        }
    }

    /// Writes the elements of a whole vector, unconverted, from `values`
    /// (`len * dtype.size()` bytes). Panics if the sizes differ.
    pub fn store_bytes(&mut self, values: &[u8]) {
        let size = self.layout.dtype.size();
        let stride = self.layout.span(0, self.layout.shape[0]) * size;
        assert_eq!(values.len(), self.layout.shape[0] * size, "byte count of the vector");
        if stride == size && !values.is_empty() {
            // SAFETY: `span` checked the range, and the elements are adjacent.
            unsafe { self.data.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
            return;
        }
        for (i, element) in values.chunks_exact(size).enumerate() {
            // SAFETY: `span` checked the range and `element` is `size` bytes of other memory.
            unsafe { self.data.add(i * stride).copy_from_nonoverlapping(element.as_ptr(), size) };
        }
    }
}

/// Writes `values` to elements `stride` apart.
///
/// # Safety
/// All of them must be writable.
#[inline]
unsafe fn store<T>(target: *mut T, stride: usize, values: &[f32], convert: impl Fn(f32) -> T) {
    for (i, &value) in values.iter().enumerate() {
        // SAFETY: element `i` is one of those the caller vouches for.
        unsafe { target.add(i * stride).write(convert(value)) };
    }
}

fn check_distinct(name: &str, layout: &Layout) -> Result<()> {
    if layout.shape[..layout.ndim].contains(&0) {
        return Ok(());
    }
    for axis in 0..layout.ndim {
        if layout.shape[axis] > 1 && layout.strides[axis] == 0 {
            bail!(
                InvalidShape,
                "{name} strides[{axis}]: got 0 over {} entries, want > 0 for an output",
                layout.shape[axis]
            );
        }
    }
    Ok(())
}

fn want_ndim(layout: &Layout, name: &str, want: usize) -> Result<()> {
    if layout.ndim != want {
        bail!(InvalidShape, "{name} dimensions: got {}, want {want}", layout.ndim);
    }
    Ok(())
}

fn want_shape(layout: &Layout, name: &str, want: &[usize]) -> Result<()> {
    let got = &layout.shape[..layout.ndim];
    if got != want {
        bail!(InvalidShape, "{name} shape: got {got:?}, want {want:?}");
    }
    Ok(())
}

fn want_dim(layout: &Layout, name: &str, axis: usize, want: usize, what: &str) -> Result<()> {
    let got = layout.shape[axis];
    if got != want {
        bail!(InvalidShape, "{name} shape[{axis}]: got {got}, want {want} ({what})");
    }
    Ok(())
}

fn want_dtype(layout: &Layout, name: &str, want: &[DType]) -> Result<()> {
    if !want.contains(&layout.dtype) {
        let want: Vec<_> = want.iter().map(|dtype| dtype.name()).collect();
        bail!(InvalidDtype, "{name} dtype: got {}, want {}", layout.dtype.name(), want.join(" or "));
    }
    Ok(())
}
