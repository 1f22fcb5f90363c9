// SPDX-License-Identifier: Apache-2.0
// Programs with one mistake each, which tests/c/run.sh expects its tools to catch: otherwise their
// silence about the other programs would mean nothing.
#include <limits.h>

#include "check.h"

int main(int argc, char **argv) {
  const char *mistake = argc > 1 ? argv[1] : "";
  char *volatile heap = (char *)malloc(8);
  CHECK(heap != NULL);
  if (strcmp(mistake, "write") == 0) {
    heap[8] = 1;
  } else if (strcmp(mistake, "overflow") == 0) {
    volatile int large = INT_MAX;
    large = large + argc;
  } else if (strcmp(mistake, "leak") == 0) {
    heap = NULL;
  } else if (strcmp(mistake, "library") == 0) {
    // a buffer that is shorter than it says: the library writes behind it
    ddt_context *context = cpu_context();
    tree_memory memory;
    ddt_tree tree = poisoned_tree(&memory);
    static float logits[NUM_REQS * 2 * 4];
    const int32_t root_tokens[NUM_REQS] = {1, 2};
    const int64_t root_positions[NUM_REQS] = {3, 4};
    ddt_tree_build_params params;
    memset(&params, 0, sizeof params);
    params.struct_size = sizeof params;
    params.logits = tensor_f32(logits, NUM_REQS, 2, 4);
    params.root_tokens = root_tokens;
    params.root_positions = root_positions;
    params.tree = &tree;
    tree.num_nodes = (int32_t *)(void *)heap + 1;
    CHECK(ddt_tree_build(context, &params, NULL) == DDT_OK);
    ddt_context_free(context);
  } else {
    return 2;
  }
  free(heap);
  return 0;
}
