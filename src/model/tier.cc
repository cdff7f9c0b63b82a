#include "model/tier.h"

#include <filesystem>

#include "base/check.h"
#include "base/json.h"

namespace weft {

bool is_routed_expert(std::string_view tensor) {
  return tensor.find(".experts.") != tensor.npos;
}

const std::vector<Tier>& named_tiers() {
  static const std::vector<Tier> tiers = {{"bf16"},
                                          {"int8-experts", WeightFormat::int8},
                                          {"fp8-experts", WeightFormat::e4m3},
                                          {"mxfp8-experts", WeightFormat::mxfp8},
                                          {"fp4-experts", WeightFormat::mxfp4}};
  return tiers;
}

Tier read_tier(const std::string& word) {
  std::string names;
  for (const Tier& tier : named_tiers()) {
    if (word == tier.name) return tier;
    names += tier.name + ", ";
  }
  if (!std::filesystem::is_regular_file(word))
    usage("--tier {}: expected {}or a file such as {{\"experts\": \"mxfp4\"}}", printable(word), names);
  const Json json = parse_json_file(word);
  const Fields fields(json, printable(word));
  Tier tier{word, {}};
  for (const auto& [key, value] : json.items())
    if (key != "experts")
      fail("{}: unknown part {}: only experts can be re-tiered", printable(word), printable(key));
  if (!fields.has("experts")) return tier;
  const std::string format = fields.string("experts");
  for (const WeightFormat f :
       {WeightFormat::int8, WeightFormat::e4m3, WeightFormat::mxfp8, WeightFormat::mxfp4})
    if (format == format_name(f)) tier.experts = f;
  if (!tier.experts)
    fail("{}: experts is {}, expected int8, fp8, mxfp8 or mxfp4", printable(word), printable(format));
  return tier;
}

}  // namespace weft
