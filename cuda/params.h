// SPDX-License-Identifier: Apache-2.0
//
// Every parameter struct: the only contract between the kernels and the host code that launches them.
#ifndef DDT_CUDA_PARAMS_H
#define DDT_CUDA_PARAMS_H

#include "params/commit.h"
#include "params/common.h"
#include "params/gdn_verify.h"
#include "params/tree_accept.h"
#include "params/tree_attention.h"
#include "params/tree_attention_sm90.h"
#include "params/tree_build.h"
#include "params/tree_gather.h"
#include "params/tree_mask.h"

#endif
