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

/// One line for bug reports: version, ABI, the commit that was built ("+": with changes; "unknown":
/// not from a checkout), the backends of this build and, for CUDA, the architectures that it holds
/// machine code (sm) and PTX (compute) for, such as
/// "ddtree/0.1.0 abi/1 git/0123456789ab backends/cpu,cuda archs/sm_90a,compute_80". The string is
/// static.
#[unsafe(no_mangle)]
pub extern "C" fn ddt_build_info() -> *const c_char {
    BUILD_INFO.as_ptr().cast()
}

macro_rules! build_info {
    ($($backends:expr),*) => {
        concat!(
            "ddtree/",
            env!("CARGO_PKG_VERSION"),
            " abi/1 git/",
            env!("DDTREE_GIT"),
            " backends/",
            $($backends,)*
            "\0"
        )
    };
}
#[cfg(feature = "cuda")]
const BUILD_INFO: &str = build_info!("cpu,cuda archs/", env!("DDTREE_CUDA_ARCHS_BUILT"));
#[cfg(not(feature = "cuda"))]
const BUILD_INFO: &str = build_info!("cpu");
