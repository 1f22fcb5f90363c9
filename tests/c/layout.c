// SPDX-License-Identifier: Apache-2.0
// The layout of every struct, which no release may change: fields are only appended. A second
// translation unit that includes the header, too.
#include <assert.h>

#include "check.h"

#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset), #type "." #field)
#define SIZE(type, size) static_assert(sizeof(type) == (size), #type)

AT(ddt_tensor, dtype, 8);
AT(ddt_tensor, shape, 16);
AT(ddt_tensor, strides, 48);
SIZE(ddt_tensor, 80);

AT(ddt_context_params, device, 8);
AT(ddt_context_params, flags, 16);
SIZE(ddt_context_params, 20);

AT(ddt_tree, num_reqs, 4);
AT(ddt_tree, max_nodes, 8);
AT(ddt_tree, max_depth, 12);
AT(ddt_tree, num_nodes, 16);
AT(ddt_tree, tokens, 24);
AT(ddt_tree, flags, 104);
SIZE(ddt_tree, 112);

AT(ddt_tree_build_params, logits, 8);
AT(ddt_tree_build_params, transition_scores, 248);
AT(ddt_tree_build_params, depth_scales, 328);
AT(ddt_tree_build_params, candidate_caps, 368);
AT(ddt_tree_build_params, max_stop_tokens, 384);
AT(ddt_tree_build_params, max_candidates, 388);
AT(ddt_tree_build_params, tree, 424);
AT(ddt_tree_build_params, tree_index, 432);
AT(ddt_tree_build_params, temperatures, 512);
AT(ddt_tree_build_params, spine_depths, 520);
SIZE(ddt_tree_build_params, 528);

AT(ddt_tree_gather_params, tree, 16);
AT(ddt_tree_gather_params, query_start, 104);
AT(ddt_tree_gather_params, mrope_positions, 192);
SIZE(ddt_tree_gather_params, 272);

AT(ddt_tree_mask_params, num_nodes, 16);
AT(ddt_tree_mask_params, tree, 64);
SIZE(ddt_tree_mask_params, 72);

AT(ddt_tree_accept_params, tree, 8);
AT(ddt_tree_accept_params, logits, 24);
AT(ddt_tree_accept_params, workspace, 136);
AT(ddt_tree_accept_params, temperatures, 152);
SIZE(ddt_tree_accept_params, 192);

AT(ddt_tree_attention_params, prefix_rows, 344);
AT(ddt_tree_attention_params, softmax_scale, 360);
AT(ddt_tree_attention_params, workspace, 448);
SIZE(ddt_tree_attention_params, 464);

AT(ddt_gdn_layer, state_slots, 480);
SIZE(ddt_gdn_layer, 496);
AT(ddt_gdn_verify_params, query_start, 904);
AT(ddt_gdn_verify_params, workspace, 1008);
SIZE(ddt_gdn_verify_params, 1024);

AT(ddt_kv_layer, row_slots, 160);
SIZE(ddt_kv_layer, 168);
AT(ddt_commit_params, snapshot_tokens, 64);
AT(ddt_commit_params, workspace, 80);
SIZE(ddt_commit_params, 96);

uint32_t abi_version_of_another_unit(void);
uint32_t abi_version_of_another_unit(void) { return ddt_abi_version(); }
