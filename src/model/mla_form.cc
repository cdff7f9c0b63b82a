#include "model/mla_form.h"

#include <fmt/core.h>

namespace weft {
namespace {

// Flops per (query, key) pair and head are 2 (nope + rope + v) expanded, and the 2 R (nope + v) of a rebuilt
// key shared by the rows of a chunk; absorbed they are 2 (2 R + rope). A selection makes the absorbed form
// constant from top-k on. The chunk is the usual one, not the run's: a row's form, so its bits, may not
// depend on where its prompt is cut.
double expanded_flops(const MlaSpec& mla) {
  constexpr double kChunk = 512;
  return 2.0 * (mla.nope + mla.rope + mla.v) + 2.0 * mla.kv_lora * (mla.nope + mla.v) / kChunk;
}
double absorbed_flops(const MlaSpec& mla) {
  return 2.0 * (2.0 * mla.kv_lora + mla.rope);
}

}  // namespace

int expand_below(MlaForm form, const ModelConfig& c, bool selects) {
  if (form == MlaForm::absorbed) return 0;
  constexpr int kAlways = 1 << 30;
  if (form == MlaForm::expanded) return kAlways;
  const double ratio = absorbed_flops(c.mla) / expanded_flops(c.mla);
  if (!selects) return ratio > 1 ? kAlways : 0;
  return round_up(static_cast<int>(c.indexer.topk * ratio), kKeyBlock);
}

std::string explain_mla(const BuildOptions& options, const ModelConfig& c) {
  bool selects = false, any = false;
  for (const LayerSpec& layer : c.layers) {
    any = any || layer.mixer == Mixer::mla;
    selects = selects || layer.own_indexer || layer.shared_index;
  }
  if (!any) return "";
  selects = selects && options.dsa != DsaMode::dense;
  const int below = expand_below(options.mla, c, selects);
  const std::string why = fmt::format("{:.0f} operations a pair and head against {:.0f} absorbed",
                                      expanded_flops(c.mla), absorbed_flops(c.mla));
  if (options.mla != MlaForm::automatic) return below ? "expanded, as asked for" : "absorbed, as asked for";
  if (below == 0) return fmt::format("absorbed: expanded takes {}", why);
  if (!selects) return fmt::format("expanded: {}", why);
  return fmt::format("expanded below position {}: {}; beyond it absorbed, over {} selected keys", below, why,
                     c.indexer.topk);
}

}  // namespace weft
