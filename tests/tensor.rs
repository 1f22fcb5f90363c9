// SPDX-License-Identifier: Apache-2.0
//! Strided views: addresses, bounds, conversions, and what is refused.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ddtree::{DType, Error, Status, TensorMut, TensorRef};
use half::{bf16, f16};
use proptest::prelude::*;

fn status<T>(result: Result<T, Error>) -> Status {
    result.err().expect("refused").status()
}

fn panics<T>(body: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(body)).is_err()
}

proptest! {
    #![proptest_config(common::cases(200))]

    /// Every way to reach an element gives the one at the sum of index times stride.
    #[test]
    fn elements_are_where_the_strides_say(
        shape in prop::collection::vec(1usize..5, 3),
        strides in prop::collection::vec(0i64..40, 3),
    ) {
        let offset = |index: [usize; 3]| -> usize { index.iter().zip(&strides).map(|(&i, &s)| i * s as usize).sum() };
        let size = offset([shape[0] - 1, shape[1] - 1, shape[2] - 1]) + 1;
        let data: Vec<f32> = (0..size).map(|x| x as f32).collect();
        let view = TensorRef::with_strides(&data, &shape, &strides).unwrap();
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                let mut row = vec![f32::NAN; shape[2]];
                view.at(i).at(j).load_f32(0, &mut row);
                let mut bytes = vec![0; shape[2] * 4];
                view.at(i).at(j).load_bytes(&mut bytes);
                for (k, value) in row.iter().enumerate() {
                    prop_assert_eq!(*value, offset([i, j, k]) as f32);
                    prop_assert_eq!(view.get_f32(&[i, j, k]), *value);
                    prop_assert_eq!(&bytes[k * 4..k * 4 + 4], &value.to_ne_bytes()[..]);
                    let mut one = [0.0];
                    view.at(i).at(j).load_f32(k, &mut one);
                    prop_assert_eq!(one[0], *value);
                }
            }
        }
        // one element less does not hold the view
        prop_assert!(TensorRef::with_strides(&data[..size - 1], &shape, &strides).is_err());
    }

    /// A store reaches its elements and nothing between them.
    #[test]
    fn stores_touch_nothing_else(rows in 1usize..4, len in 1usize..6, gap in 1i64..4, start in 0usize..6, as_bytes: bool) {
        let stride = len as i64 * gap + 1;
        let mut data = vec![bf16::from_f32(-1.0); rows * stride as usize];
        let start = if as_bytes { 0 } else { start.min(len - 1) };
        let values: Vec<f32> = (start..len).map(|i| 1.0 + i as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect();
        let mut view = TensorMut::with_strides(&mut data, &[rows, len], &[stride, gap]).unwrap();
        if as_bytes {
            view.at(rows - 1).store_bytes(&bytes);
        } else {
            view.at(rows - 1).store_f32(start, &values);
        }
        prop_assert_eq!(view.view().get_f32(&[rows - 1, len - 1]), len as f32);
        let mut want = vec![-1.0; data.len()];
        for i in start..len {
            want[(rows - 1) * stride as usize + i * gap as usize] = 1.0 + i as f32;
        }
        prop_assert_eq!(data.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), want);
    }
}

#[test]
fn halves_convert_exactly_and_round_half_to_even() {
    let widened = [1.5f32, -0.0, 65504.0, f32::INFINITY, 6.0e-8];
    let halves = widened.map(f16::from_f32);
    for strides in [1, 2] {
        let mut spread = vec![f16::NAN; halves.len() * strides];
        halves.iter().enumerate().for_each(|(i, &x)| spread[i * strides] = x);
        let mut out = [0.0; 5];
        let view = TensorRef::with_strides(&spread, &[5], &[strides as i64]).expect("a vector");
        view.load_f32(0, &mut out);
        assert_eq!(out.map(f32::to_bits), halves.map(|x| x.to_f32().to_bits()));
    }
    let mut data = [f16::ZERO; 2];
    TensorMut::new(&mut data, &[2]).expect("a vector").store_f32(0, &[2049.0, 2051.0]);
    assert_eq!(data.map(f16::to_f32), [2048.0, 2052.0]);
    let mut data = [bf16::ZERO; 2];
    TensorMut::new(&mut data, &[2]).expect("a vector").store_f32(0, &[257.0, 259.0]);
    assert_eq!(data.map(bf16::to_f32), [256.0, 260.0]);
}

#[test]
fn bad_shapes_are_refused() {
    let data = [0.0f32; 6];
    assert_eq!(status(TensorRef::new(&data, &[7])), Status::InvalidShape);
    assert_eq!(status(TensorRef::new(&data, &[1, 1, 1, 1, 1])), Status::InvalidShape);
    assert_eq!(status(TensorRef::with_strides(&data, &[2, 3], &[3])), Status::InvalidShape);
    assert_eq!(status(TensorRef::with_strides(&data, &[2, 3], &[-3, 1])), Status::InvalidShape);
    assert_eq!(status(TensorRef::with_strides(&data, &[usize::MAX, 1], &[0, 1])), Status::InvalidShape);
    for shape in [[usize::MAX, 2], [1 << 32, 1 << 31], [1 << 62, 4]] {
        assert_eq!(status(TensorRef::new(&data, &shape)), Status::InvalidShape, "{shape:?}");
    }
    // an output must not write one element twice; an extent of 1 has no second one
    let mut data = [0.0f32; 6];
    assert_eq!(status(TensorMut::with_strides(&mut data, &[2, 3], &[0, 1])), Status::InvalidShape);
    assert!(TensorMut::with_strides(&mut data, &[1, 3], &[0, 1]).is_ok());
    assert!(TensorRef::with_strides(&data, &[9, 3], &[0, 1]).is_ok());
    // nothing in it, so nothing to hold
    assert!(TensorRef::with_strides(&data[..0], &[1 << 40, 0], &[1 << 40, 1]).is_ok());
}

#[test]
fn raw_memory_is_checked() {
    let data = [0i64; 4];
    let pointer = data.as_ptr().cast::<u8>();
    // SAFETY: refused, or not read.
    let raw = |pointer, dtype, shape: &[i64], strides: &[i64]| unsafe {
        TensorRef::from_raw("x", pointer, dtype, shape, strides)
    };
    assert!(raw(pointer, DType::I64, &[2, 2], &[2, 1]).is_ok());
    assert_eq!(status(raw(pointer.wrapping_add(4), DType::I64, &[1], &[1])), Status::Misaligned);
    assert!(raw(pointer.wrapping_add(4), DType::F32, &[1], &[1]).is_ok());
    assert_eq!(status(raw(std::ptr::null(), DType::I64, &[1], &[1])), Status::NullPointer);
    assert!(raw(std::ptr::null(), DType::I64, &[0, 3], &[3, 1]).is_ok());
    assert_eq!(status(raw(pointer, DType::I64, &[-1], &[1])), Status::InvalidShape);
    assert_eq!(status(raw(pointer, DType::I64, &[2, 2], &[i64::MAX, 1])), Status::InvalidShape);
    let high = std::ptr::without_provenance(usize::MAX - 7);
    assert_eq!(status(raw(high, DType::I64, &[2], &[1])), Status::InvalidShape);
}

#[test]
fn indices_outside_of_the_shape_panic() {
    let mut data = [0.0f32; 6];
    let view = TensorRef::new(&data, &[2, 3]).expect("a matrix");
    assert!(panics(|| view.at(2)));
    assert!(panics(|| view.get_f32(&[0, 3])));
    assert!(panics(|| view.get_f32(&[0])));
    assert!(panics(|| view.get_i32(&[0, 0])));
    assert!(panics(|| view.at(0).load_f32(1, &mut [0.0; 3])));
    assert!(panics(|| view.at(0).load_f32(usize::MAX, &mut [0.0; 3])));
    assert!(panics(|| view.load_f32(0, &mut [0.0; 3])));
    assert!(panics(|| view.at(0).load_bytes(&mut [0; 11])));
    let empty = TensorRef::with_strides(&[] as &[f32], &[5, 0], &[i64::MAX, i64::MAX]).expect("empty");
    empty.at(4).load_f32(0, &mut []);
    let mut view = TensorMut::new(&mut data, &[2, 3]).expect("a matrix");
    assert!(panics(|| view.at(2).store_f32(0, &[1.0])));
    assert!(panics(|| view.at(1).store_f32(1, &[1.0; 3])));
    assert!(panics(|| view.at(1).store_bytes(&[0; 13])));
    assert_eq!(data, [0.0; 6]);
}
