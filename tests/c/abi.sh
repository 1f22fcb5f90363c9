#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares what include/ddtree.h promises with abi.txt: every number, every field with its offset and
# size, every prototype. A change of any of them breaks programs that exist and needs a new
# DDT_ABI_VERSION; what is new (a constant, a function, a field at the end of a versioned struct) has
# to be added to the list, with --write.
set -eu
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
header=${DDTREE_HEADER:-$here/../../include/ddtree.h}
list=${DDTREE_ABI_LIST:-$here/abi.txt}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# a C program that prints the list
awk '
  function squeeze(text) { gsub(/[ \t]+/, " ", text); sub(/^ /, "", text); sub(/ $/, "", text); return text }
  BEGIN { print "#include <stdio.h>\n#include \"ddtree.h\"\nint main(void) {" }
  { sub(/\/\/.*/, "") }
  /^#define DDT_[A-Z0-9_]+ -?[0-9]/ { printf "printf(\"constant %s %%lld\\n\", (long long)%s);\n", $2, $2 }
  /^typedef struct [a-z_]+ \{/ { type = $3 }
  /^typedef [^{]*;/ { printf "puts(\"%s\");\n", squeeze($0) }
  type && /^  .*;/ {
    declaration = squeeze($0); sub(/;$/, "", declaration)
    name = declaration; sub(/\[.*/, "", name); sub(/.*[ *]/, "", name)
    printf "printf(\"field %s.%s at %%zu size %%zu: %s\\n\", offsetof(%s, %s), sizeof(((%s *)0)->%s));\n",
      type, name, declaration, type, name, type, name
  }
  type && /^}/ { printf "printf(\"struct %s size %%zu\\n\", sizeof(%s));\n", type, type; type = "" }
  !type && /^(ddt_status|const char|uint32_t|void) \*?ddt_[a-z_]+\(/ { prototype = "" ; open = 1 }
  open { prototype = prototype " " $0 }
  open && /;/ { printf "puts(\"function %s\");\n", squeeze(prototype); open = 0 }
  END { print "return 0; }" }' "$header" >"$out/list.c"
${CC:-gcc} -std=c11 -Wall -Wextra -Werror -I"$(dirname "$header")" "$out/list.c" -o "$out/list"
"$out/list" | sort >"$out/now"
grep -q '^function .*ddt_tree_build(' "$out/now" || { echo "cannot read $header" >&2; exit 1; }

touch "$out/before"
[ ! -f "$list" ] || sort "$list" >"$out/before"
comm -23 "$out/before" "$out/now" >"$out/gone"
comm -13 "$out/before" "$out/now" >"$out/new"
# a struct that starts with its own size may grow
while read -r kind name rest; do
  if [ "$kind" = struct ] && grep -q "^field $name.struct_size at 0 " "$out/before"; then
    size=$(sed -n "s/^struct $name size //p" "$out/now")
    if [ -n "$size" ] && [ "$size" -gt "${rest#size }" ]; then continue; fi
  fi
  echo "$kind $name $rest"
done <"$out/gone" >"$out/broken"

if [ -s "$out/broken" ] && ! grep -q '^constant DDT_ABI_VERSION ' "$out/gone"; then
  echo "these break programs that use the ABI (only a new DDT_ABI_VERSION may):" >&2
  cat "$out/broken" >&2
  exit 1
fi
if [ "${1:-}" = --write ]; then
  cp "$out/now" "$list"
elif [ -s "$out/new" ] || [ -s "$out/gone" ]; then
  echo "tests/c/abi.txt does not have these yet: run tests/c/abi.sh --write" >&2
  cat "$out/new" >&2
  exit 1
fi
echo "abi: $(wc -l <"$out/now") entries as listed"
