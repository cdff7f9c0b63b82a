// What is stored in what. A tier is a choice for every part of a model that has one; the rest is kept as the
// checkpoint stores it.
//
//   tier          routed experts   other weights (they decide more per byte)
//   bf16          as stored        as stored
//   int8-experts  int8             as stored
//   fp8-experts   fp8 (128 x 128)  as stored
//   mxfp8-experts mxfp8            as stored
//   fp4-experts   mxfp4            as stored
//   a file        {"experts": "int8", "fp8", "mxfp8" or "mxfp4"}
//
// `weft quantize` writes a checkpoint in a tier's formats; --tier packs one so while it is loaded: the same
// codes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/packed.h"

namespace weft {

struct Tier {
  std::string name = "bf16";
  std::optional<WeightFormat> experts = {};  // none: as stored
};

const std::vector<Tier>& named_tiers();
// A name of the table, or a JSON file of the parts' formats. error: no such tier (usage), or a file that says
// something else, with the words it may use.
Tier read_tier(const std::string& word);

bool is_routed_expert(std::string_view tensor);  // by its name in the checkpoint

}  // namespace weft
