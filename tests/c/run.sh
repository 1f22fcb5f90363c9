#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles each program as C11 and as C++17, links it to the static and to the shared library, and
# runs it. Needs gcc, g++, nm and a release build (which it makes). CC and CXX override compilers.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lib=${CARGO_TARGET_DIR:-$root/target}/release
cc=${CC:-gcc}
cxx=${CXX:-g++}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

(cd "$root" && cargo build --release --quiet)

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

warnings="-Wall -Wextra -Werror -pedantic"
# what `rustc --print native-static-libs` asks for on Linux
system="-lgcc_s -lutil -lrt -lpthread -lm -ldl"
for language in "c11 $cc -std=c11 -x c" "c++17 $cxx -std=c++17 -x c++"; do
  name=${language%% *}
  compile=${language#* }
  for program in smoke errors struct_size; do
    objects=
    for source in $program layout; do
      $compile $warnings -g -I"$root/include" -c "$here/$source.c" -o "$out/$source.o"
      objects="$objects $out/$source.o"
    done
    link=${compile%% *}
    $link $objects "$lib/libddtree.a" $system -o "$out/static"
    $link $objects -L"$lib" -lddtree -Wl,-rpath,"$lib" -o "$out/shared"
    for kind in static shared; do
      printf '%s %s ' "$name" "$kind"
      "$out/$kind"
    done
  done
done

# the program of include/README.md
sed -n '/^```c$/,/^```$/p' "$root/include/README.md" | sed '1d;$d' >"$out/readme.c"
$cc -std=c11 $warnings -I"$root/include" "$out/readme.c" -L"$lib" -lddtree -Wl,-rpath,"$lib" -o "$out/readme"
"$out/readme" | grep -q '^node 4: token 2, parent 0$'

# the caller's side under the sanitizers: no leak, no write outside of caller memory
for program in smoke errors struct_size; do
  $cc -std=c11 $warnings -g -fsanitize=address,undefined -fno-sanitize-recover=all -I"$root/include" \
    "$here/$program.c" "$here/layout.c" "$lib/libddtree.a" $system -o "$out/sanitized"
  nm "$out/sanitized" | grep -q __asan_init || { echo "$program has no sanitizer" >&2; exit 1; }
  printf 'sanitized static '
  "$out/sanitized"
done
