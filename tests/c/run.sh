#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles each program as C11 and as C++17, links it to the static and to the shared library, and
# runs it. Needs gcc, g++, nm and a release build (which it makes); uses valgrind if it is there. CC and
# CXX override compilers, DDTREE_TEST_CARGO_OPTIONS=--no-default-features tests a build without CUDA.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lib=${CARGO_TARGET_DIR:-$root/target}/release
cc=${CC:-gcc}
cxx=${CXX:-g++}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

(cd "$root" && cargo build --release --quiet ${DDTREE_TEST_CARGO_OPTIONS:-})
lib=$(cd "$lib" && pwd)

exported=$(nm -D --defined-only "$lib/libddtree.so" | awk '{print $NF}')
foreign=$(printf '%s\n' "$exported" | grep -v '^ddt_' || true)
if [ -n "$foreign" ]; then
  echo "libddtree.so exports more than ddt_*:" $foreign >&2
  exit 1
fi
# one way each: what the header declares is exported, and the reverse
declared=$(grep -o 'ddt_[a-z_]*(' "$root/include/ddtree.h" | tr -d '(' | sort -u)
if [ "$declared" != "$(printf '%s\n' "$exported" | sort -u)" ]; then
  echo "include/ddtree.h and libddtree.so name different functions" >&2
  exit 1
fi
"$here/abi.sh"

# programs ask the loader for the soname
ln -s "$lib/libddtree.so" "$out/libddtree.so.1"

warnings="-Wall -Wextra -Werror -pedantic"
# what `rustc --print native-static-libs` asks for on Linux
system="-lgcc_s -lutil -lrt -lpthread -lm -ldl"
for language in "c11 $cc -std=c11 -x c" "c++17 $cxx -std=c++17 -x c++"; do
  name=${language%% *}
  compile=${language#* }
  for program in smoke errors struct_size hostile; do
    objects=
    for source in $program layout; do
      $compile $warnings -g -I"$root/include" -c "$here/$source.c" -o "$out/$source.o"
      objects="$objects $out/$source.o"
    done
    link=${compile%% *}
    $link $objects "$lib/libddtree.a" $system -o "$out/static"
    $link $objects "$lib/libddtree.so" -Wl,-rpath,"$out" -o "$out/shared"
    for kind in static shared; do
      printf '%s %s ' "$name" "$kind"
      "$out/$kind"
    done
  done
done

# the program of include/README.md
sed -n '/^```c$/,/^```$/p' "$root/include/README.md" | sed '1d;$d' >"$out/readme.c"
$cc -std=c11 $warnings -I"$root/include" "$out/readme.c" "$lib/libddtree.so" -Wl,-rpath,"$out" -o "$out/readme"
"$out/readme" | grep -q '^node 4: token 2, parent 0$'

# Sanitizers see what the C side does (leaks, undefined behaviour); valgrind also what the library
# does, which they did not compile. Each must catch a program that is broken on purpose.
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=all"
build() {
  flags=$1
  program=$2
  shift 2
  $cc -std=c11 $warnings -g $flags -I"$root/include" "$@" "$lib/libddtree.a" $system -o "$out/$program"
}
must_fail() {
  want=$1
  shift
  if text=$("$@" 2>&1); then
    echo "not caught: $*" >&2
    exit 1
  fi
  case $text in
  *"$want"*) ;;
  *)
    printf '%s\ncaught as something else than %s: %s\n' "$text" "$want" "$*" >&2
    exit 1
    ;;
  esac
}
build "$sanitize" broken "$here/broken.c"
must_fail heap-buffer-overflow "$out/broken" write
must_fail "signed integer overflow" "$out/broken" overflow
must_fail "LeakSanitizer" "$out/broken" leak
for program in smoke errors struct_size hostile; do
  build "$sanitize" sanitized "$here/$program.c" "$here/layout.c"
  printf 'sanitized static '
  "$out/sanitized"
done
if command -v valgrind >/dev/null; then
  check="valgrind --quiet --error-exitcode=9 --leak-check=full --trace-children=no"
  build "" broken "$here/broken.c"
  must_fail "Invalid write" $check "$out/broken" library
  must_fail "definitely lost" $check "$out/broken" leak
  for program in smoke errors struct_size hostile; do
    build "" "$program" "$here/$program.c" "$here/layout.c"
    printf 'valgrind static '
    $check "$out/$program"
  done
  build "-O1" round "$root/include/examples/round.c"
  $check "$out/round" >"$out/round.log"
  tail -n 1 "$out/round.log"
else
  echo "valgrind: skipped, it is not installed"
fi

# the driver is looked for when a CUDA context is made: none, old ones, and GPUs that cannot do it
$cc -std=c11 $warnings -shared -fPIC "$here/stub_driver.c" -o "$out/libcuda.so.1"
$cc -std=gnu11 $warnings -I"$root/include" "$here/driver.c" "$lib/libddtree.so" -ldl -Wl,-rpath,"$out" -o "$out/driver"
if [ -n "${DDTREE_TEST_CARGO_OPTIONS:-}" ]; then
  echo "driver: skipped, this build has no CUDA"
  exit
fi
expect() {
  want=$1
  shift
  got=$(env "$@")
  case $got in
  *"$want"*) ;;
  *)
    printf 'got  %s\nwant %s\n' "$got" "$want" >&2
    exit 1
    ;;
  esac
}
stub="LD_LIBRARY_PATH=$out"
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
  expect "DDT_NO_DEVICE context_create: CUDA driver: got none, want libcuda.so.1" "$out/driver"
fi
expect "DDT_CUDA_ERROR context_create: CUDA driver: got one for CUDA 12.4, want 13.0 or later" \
  "$stub" STUB_VERSION=12040 "$out/driver"
expect "DDT_NO_DEVICE context_create: cuInit: got CUDA_ERROR_NO_DEVICE, want success" "$stub" STUB_INIT=100 "$out/driver"
expect "DDT_CUDA_ERROR context_create: cuInit: got driver error 999, want success" "$stub" STUB_INIT=999 "$out/driver"
expect "DDT_NO_DEVICE context_create: params.device_index: got 0, want one of the 0 visible GPUs" \
  "$stub" STUB_DEVICES=0 "$out/driver"
expect "DDT_NO_DEVICE context_create: params.device_index: got 2, want one of the 2 visible GPUs" \
  "$stub" STUB_DEVICES=2 "$out/driver" 2
for module in 0 3; do
  expect "DDT_ARCH_NOT_BUILT context_create: GPU: got compute capability 7.5, want one that sm_" \
    "$stub" STUB_CAPABILITY=75 STUB_FAIL_AT_MODULE=$module "$out/driver"
done
expect "DDT_UNSUPPORTED context_create: GPU: got 16384 bytes of shared memory per block, want" \
  "$stub" STUB_SHARED=16384 "$out/driver"
expect "DDT_OK" "$stub" "$out/driver"
echo "driver: none, old, without a GPU, without our architecture, with little shared memory, good"
