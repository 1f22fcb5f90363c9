// SPDX-License-Identifier: Apache-2.0
//! Tensors with any memory order and gaps, in memory whose every other byte is watched.

use std::cell::Cell;

use ddtree::DType;
use ddtree::ffi::ddt_tensor;
use half::{bf16, f16};

use super::numbers::Rng;

/// All bytes start like this, which is a NaN in every float type.
const POISON: u8 = 0xff;
/// Watched elements before and behind the tensor.
const MARGIN: usize = 8;

/// How the axes of a tensor lie in memory.
#[derive(Clone, Debug)]
pub struct Order {
    /// Axes from the slowest to the fastest.
    pub axes: Vec<usize>,
    /// Unused elements behind each axis that has a slower one.
    pub gap: usize,
}

impl Order {
    pub fn dense(ndim: usize) -> Self {
        Self { axes: (0..ndim).collect(), gap: 0 }
    }

    pub fn axes(axes: &[usize]) -> Self {
        Self { axes: axes.to_vec(), gap: 0 }
    }

    pub fn random(rng: &mut Rng, ndim: usize) -> Self {
        Self { axes: rng.permutation(ndim), gap: rng.below(3) }
    }
}

#[derive(Clone)]
pub struct Buffer {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    /// u64 for the alignment; calls write through shared references.
    words: Vec<Cell<u64>>,
}

impl Buffer {
    pub fn new(dtype: DType, shape: &[usize], order: &Order) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for &axis in order.axes.iter().rev() {
            strides[axis] = stride;
            stride = stride * shape[axis] + order.gap;
        }
        let last: usize = shape.iter().zip(&strides).map(|(&n, &s)| n.saturating_sub(1) * s).sum();
        let bytes = (last + 1 + 2 * MARGIN) * dtype.size();
        let words = vec![Cell::new(u64::from_ne_bytes([POISON; 8])); bytes.div_ceil(8)];
        Self { dtype, shape: shape.to_vec(), strides, words }
    }

    pub fn filled(
        dtype: DType,
        shape: &[usize],
        order: &Order,
        mut value: impl FnMut(&[usize]) -> f64,
    ) -> Self {
        let mut buffer = Self::new(dtype, shape, order);
        for index in buffer.indices() {
            buffer.set(&index, value(&index));
        }
        buffer
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: plain memory of that size.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * 8) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * 8) }
    }

    /// Every index of the tensor, last axis fastest.
    pub fn indices(&self) -> impl Iterator<Item = Vec<usize>> + use<> {
        let shape = self.shape.clone();
        (0..shape.iter().product::<usize>()).map(move |mut i| {
            let mut index = vec![0; shape.len()];
            for axis in (0..shape.len()).rev() {
                index[axis] = i % shape[axis];
                i /= shape[axis];
            }
            index
        })
    }

    fn range(&self, index: &[usize]) -> std::ops::Range<usize> {
        assert!(index.iter().zip(&self.shape).all(|(i, n)| i < n), "{index:?} in {:?}", self.shape);
        let element: usize = index.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
        let start = (MARGIN + element) * self.dtype.size();
        start..start + self.dtype.size()
    }

    /// The bytes of one element.
    pub fn raw(&self, index: &[usize]) -> &[u8] {
        &self.bytes()[self.range(index)]
    }

    pub fn set_raw(&mut self, index: &[usize], bytes: &[u8]) {
        let range = self.range(index);
        self.bytes_mut()[range].copy_from_slice(bytes);
    }

    pub fn get(&self, index: &[usize]) -> f64 {
        let raw = self.raw(index);
        match self.dtype {
            DType::F32 => f32::from_ne_bytes(raw.try_into().unwrap()).into(),
            DType::F16 => f16::from_ne_bytes(raw.try_into().unwrap()).into(),
            DType::BF16 => bf16::from_ne_bytes(raw.try_into().unwrap()).into(),
            DType::I32 => i32::from_ne_bytes(raw.try_into().unwrap()).into(),
            DType::U8 => raw[0].into(),
            DType::I64 => unreachable!("f64 does not hold every i64"),
        }
    }

    pub fn set(&mut self, index: &[usize], value: f64) {
        match self.dtype {
            DType::F32 => self.set_raw(index, &(value as f32).to_ne_bytes()),
            DType::F16 => self.set_raw(index, &f16::from_f32(value as f32).to_ne_bytes()),
            DType::BF16 => self.set_raw(index, &bf16::from_f32(value as f32).to_ne_bytes()),
            DType::I32 => self.set_raw(index, &(value as i32).to_ne_bytes()),
            DType::U8 => self.set_raw(index, &[value as u8]),
            DType::I64 => unreachable!("f64 does not hold every i64"),
        }
    }

    /// The values along the last axis.
    pub fn row(&self, index: &[usize]) -> Vec<f64> {
        let mut index = index.to_vec();
        index.push(0);
        (0..*self.shape.last().unwrap())
            .map(|i| {
                *index.last_mut().unwrap() = i;
                self.get(&index)
            })
            .collect()
    }

    /// What the C ABI takes.
    pub fn tensor(&self) -> ddt_tensor {
        let start = self.words.as_ptr().cast::<u8>().wrapping_add(MARGIN * self.dtype.size());
        let mut tensor = ddt_tensor {
            data: start.cast_mut().cast(),
            dtype: self.dtype as u32,
            ndim: self.shape.len() as u32,
            shape: [i64::MIN; 4],
            strides: [i64::MIN; 4],
        };
        for axis in 0..self.shape.len() {
            tensor.shape[axis] = self.shape[axis] as i64;
            tensor.strides[axis] = self.strides[axis] as i64;
        }
        tensor
    }

    /// Asserts that only elements for which `may_write` holds differ from `before`, and no byte
    /// between, before or behind the elements.
    #[track_caller]
    pub fn assert_only_written(&self, name: &str, before: &Buffer, may_write: impl Fn(&[usize]) -> bool) {
        let mut watched = vec![true; self.bytes().len()];
        for index in self.indices().filter(|index| may_write(index)) {
            watched[self.range(&index)].fill(false);
        }
        for (i, (now, then)) in self.bytes().iter().zip(before.bytes()).enumerate() {
            assert!(!watched[i] || now == then, "{name}: byte {i} of {} was written", self.bytes().len());
        }
    }

    #[track_caller]
    pub fn assert_untouched(&self, name: &str, before: &Buffer) {
        assert!(self.bytes() == before.bytes(), "{name} was written");
    }
}
