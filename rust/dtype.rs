// SPDX-License-Identifier: Apache-2.0
//! Element types of tensors.

/// Element type of a tensor; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of a binary32.
    BF16 = 3,
    /// 32-bit signed integer.
    I32 = 4,
    /// 64-bit signed integer.
    I64 = 5,
    /// Byte, also the storage of one-byte floats.
    U8 = 6,
}

impl DType {
    /// The floating-point types that scores, activations and caches may have.
    pub const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::BF16];

    /// The type with this ABI number.
    pub fn from_abi(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::F32,
            2 => Self::F16,
            3 => Self::BF16,
            4 => Self::I32,
            5 => Self::I64,
            6 => Self::U8,
            _ => return None,
        })
    }

    /// Bytes per element, which is also the alignment that data must have.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I64 => 8,
            Self::U8 => 1,
        }
    }

    /// Lower-case name, as messages use it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
        }
    }
}
