#pragma once

/// @namespace flashdsa
/// All of FlashDSA: packed metadata, indexer top-k, canonical selections, sparse MLA attention.

#include "flashdsa/attention.h"
#include "flashdsa/error.h"
#include "flashdsa/indexer.h"
#include "flashdsa/metadata.h"
#include "flashdsa/runtime.h"
#include "flashdsa/selection.h"
#include "flashdsa/tensor_view.h"
