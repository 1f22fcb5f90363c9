// SPDX-License-Identifier: Apache-2.0
//! The one error type: a status for programs and a sentence for people.

use std::fmt;

/// Why a call failed; the numbers are those of the C ABI and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// A required pointer is NULL.
    NullPointer = 100,
    /// `struct_size` is too small, too large or not a multiple of the struct's alignment.
    InvalidStruct = 101,
    /// A shape, stride or length is negative, overflows or disagrees with another one.
    InvalidShape = 102,
    /// A tensor has a dtype that the argument does not accept.
    InvalidDtype = 103,
    /// A value lies outside of its documented range.
    InvalidValue = 104,
    /// The workspace is smaller than the size query says.
    WorkspaceTooSmall = 105,
    /// The caller was compiled against another ABI version.
    AbiMismatch = 106,
    /// A pointer is not aligned to its element.
    Misaligned = 107,
    /// This build or this version cannot do what was asked.
    Unsupported = 200,
    /// No such device.
    NoDevice = 201,
    /// The build contains no code for the device's architecture.
    ArchNotBuilt = 202,
    /// The CUDA driver reported an error.
    CudaError = 203,
    /// Memory ran out.
    OutOfMemory = 204,
    /// A panic was caught at the C boundary: a bug in this library.
    Panic = 900,
    /// Any other bug in this library.
    Internal = 901,
}

/// A [`Status`] and a message of the form `what was wrong: got X, want Y`.
#[derive(Clone, Debug)]
pub struct Error {
    status: Status,
    message: String,
}

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error; `message` does not repeat the name of the operation.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// Names in the message what the error is about, such as one of several layers.
    pub(crate) fn context(self, subject: impl fmt::Display) -> Self {
        Self { message: format!("{subject}: {}", self.message), ..self }
    }

    /// The status that the C ABI returns for this error.
    pub fn status(&self) -> Status {
        self.status
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Returns `Err` with the named [`Status`] and a formatted message.
macro_rules! bail {
    ($status:ident, $($message:tt)+) => {
        return Err($crate::error::Error::new($crate::error::Status::$status, format!($($message)+)))
    };
}
pub(crate) use bail;

/// Fails with `InvalidShape` unless an array has `want` elements.
pub(crate) fn want_len(name: &str, got: usize, want: usize) -> Result<()> {
    if got != want {
        bail!(InvalidShape, "{name} length: got {got}, want {want}");
    }
    Ok(())
}
