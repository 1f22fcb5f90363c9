// SPDX-License-Identifier: Apache-2.0
//! Versions of the ABI and of the library.

use std::ffi::c_char;

/// Version of this ABI; changes only with a break. Fields appended to parameter structs are not
/// one, see struct_size.
pub const DDT_ABI_VERSION: u32 = 1;

/// The DDT_ABI_VERSION that the library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn ddt_abi_version() -> u32 {
    DDT_ABI_VERSION
}

/// Version of the library, such as "0.1.0". The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn ddt_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// One line for bug reports: version, ABI, the backends of this build and, for CUDA, the
/// architectures that it holds machine code (sm) and PTX (compute) for. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn ddt_build_info() -> *const c_char {
    BUILD_INFO.as_ptr().cast()
}

#[cfg(feature = "cuda")]
const BUILD_INFO: &str = concat!(
    "ddtree/",
    env!("CARGO_PKG_VERSION"),
    " abi/1 backends/cpu,cuda archs/",
    env!("DDTREE_CUDA_ARCHS_BUILT"),
    "\0"
);
#[cfg(not(feature = "cuda"))]
const BUILD_INFO: &str = concat!("ddtree/", env!("CARGO_PKG_VERSION"), " abi/1 backends/cpu\0");
