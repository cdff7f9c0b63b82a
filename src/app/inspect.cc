// weft inspect: what a checkpoint holds and how weft reads it, from config.json and the headers alone.
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "app/cli.h"
#include "app/report.h"
#include "kernels/dispatch.h"
#include "model/model.h"

namespace weft {
namespace {

// "48.1 B", "4.2 M"
std::string count_text(size_t n) {
  const double x = static_cast<double>(n);
  return x >= 1e9 ? fmt::format("{:.2f} B", x / 1e9) : fmt::format("{:.2f} M", x / 1e6);
}

struct Counts {
  size_t parameters = 0, active = 0, embedding = 0;
  std::map<std::string, size_t> bytes_by_dtype;  // of the tensors the model uses
  size_t used_bytes = 0, file_bytes = 0;
  int used = 0, tensors = 0;
};

std::set<const TensorInfo*> used_tensors(const Weights& weights) {
  std::set<const TensorInfo*> used;
  const auto take = [&used](const auto& parts) {
    for (const auto& part : parts) used.insert(part.sources.begin(), part.sources.end());
  };
  take(weights.matrices);
  take(weights.vectors);
  take(weights.tables);
  return used;
}

bool is_scale(const TensorInfo& t) {
  return t.name.ends_with(".weight_scale_inv") || t.name.ends_with(".weight_scale");
}

// Active: what one token reads. Of the routed experts its share, of the input embedding one row, which is not
// counted.
Counts count(const Model& model) {
  Counts out;
  const ModelConfig& config = model.config();
  size_t routed = 0;
  for (const TensorInfo* t : used_tensors(model.parts().weights)) {
    ++out.used;
    out.used_bytes += t->bytes;
    out.bytes_by_dtype[stored_name(t->dtype)] += t->bytes;
    if (is_scale(*t)) continue;
    const size_t n = t->elements() * (t->name.ends_with(".weight_packed") ? 2 : 1);
    out.parameters += n;
    if (t->name.find(".experts.") != t->name.npos) routed += n;
    if (t->name.ends_with("embed_tokens.weight")) out.embedding = n;
  }
  for (const TensorInfo& t : model.checkpoint().tensors()) {
    ++out.tensors;
    out.file_bytes += t.bytes;
  }
  out.active = out.parameters - routed - (config.tie_embeddings ? 0 : out.embedding);
  if (config.moe.experts) out.active += routed / config.moe.experts * config.moe.top_k;
  return out;
}

std::string layer_kind(const LayerSpec& layer) {
  std::string kind = layer.mixer == Mixer::kda ? "KDA"
                     : layer.own_indexer       ? "DSA"
                     : layer.shared_index      ? "DSA, shared index"
                                               : "MLA";
  return kind + (layer.moe ? " + MoE" : " + dense");
}

// In order of first appearance.
std::vector<std::pair<std::string, std::vector<int>>> layers_by_kind(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::vector<int>>> kinds;
  for (int i = 0; i < config.num_layers(); ++i) {
    const std::string kind = layer_kind(config.layers[i]);
    auto at = std::find_if(kinds.begin(), kinds.end(), [&kind](const auto& k) { return k.first == kind; });
    if (at == kinds.end()) at = kinds.insert(kinds.end(), {kind, {}});
    at->second.push_back(i);
  }
  return kinds;
}

// "0-2, 4, 5"
std::string ranges(const std::vector<int>& ids) {
  std::string out;
  for (size_t i = 0; i < ids.size();) {
    size_t j = i;
    while (j + 1 < ids.size() && ids[j + 1] == ids[j] + 1) ++j;
    out += fmt::format("{}{}", out.empty() ? "" : ", ", ids[i]);
    if (j > i) out += fmt::format("{}{}", j == i + 1 ? ", " : "-", ids[j]);
    i = j + 1;
  }
  return out;
}

const char* residual_name(Residual residual) {
  switch (residual) {
    case Residual::plain:
      return "plain";
    case Residual::attn_res:
      return "attention residuals";
    case Residual::hyper:
      return "hyper-connections";
  }
  return "?";
}

const char* activation_name(Activation activation) {
  switch (activation) {
    case Activation::swiglu:
      return "SwiGLU";
    case Activation::swiglu_clamped:
      return "SwiGLU, clamped";
    case Activation::situ:
      return "SiTU";
  }
  return "?";
}

bool any(const ModelConfig& c, Mixer mixer) {
  return std::any_of(c.layers.begin(), c.layers.end(),
                     [mixer](const LayerSpec& l) { return l.mixer == mixer; });
}

Json config_json(const ModelConfig& c) {
  Json out = {{"hidden", c.hidden},
              {"vocab", c.vocab},
              {"max_positions", c.max_positions},
              {"activation", activation_name(c.activation)},
              {"residual", residual_name(c.residual)},
              {"dense_intermediate", c.dense_intermediate},
              {"tie_embeddings", c.tie_embeddings},
              {"mtp_layers", c.mtp_layers},
              {"stop_ids", c.stop}};
  if (c.attn_res_block) out["attn_res_block"] = c.attn_res_block;
  if (c.hc_streams) out["hc_streams"] = c.hc_streams;
  if (any(c, Mixer::kda)) out["kda"] = {{"heads", c.kda.heads}, {"head_dim", c.kda.head_dim}};
  if (any(c, Mixer::mla))
    out["mla"] = {{"heads", c.mla.heads},
                  {"q_lora", c.mla.q_lora},
                  {"kv_lora", c.mla.kv_lora},
                  {"nope", c.mla.nope},
                  {"rope", c.mla.rope},
                  {"v", c.mla.v},
                  {"output_gate", c.mla.output_gate}};
  if (c.indexer.heads)
    out["indexer"] = {{"heads", c.indexer.heads},
                      {"dim", c.indexer.dim},
                      {"topk", c.indexer.topk},
                      {"pool", c.indexer.pool}};
  if (c.moe.experts)
    out["moe"] = {{"experts", c.moe.experts},
                  {"top_k", c.moe.top_k},
                  {"intermediate", c.moe.intermediate},
                  {"shared_intermediate", c.moe.shared_intermediate},
                  {"latent", c.moe.latent}};
  return out;
}

Json inspect_json(const Model& model) {
  const ModelConfig& c = model.config();
  const Counts counts = count(model);
  Json out = {{"model", model.checkpoint().name()},
              {"path", model.checkpoint().path()},
              {"family", c.family},
              {"chat", model.arch().chat},
              {"layers", c.num_layers()},
              {"parameters", counts.parameters},
              {"active_parameters", counts.active},
              {"tensors", counts.tensors},
              {"tensors_used", counts.used},
              {"file_bytes", counts.file_bytes},
              {"used_bytes", counts.used_bytes},
              {"bytes_by_dtype", counts.bytes_by_dtype},
              {"unused", model.checkpoint().unused_summary()},
              {"config", config_json(c)},
              {"warnings", c.warnings}};
  for (const auto& [kind, ids] : layers_by_kind(c)) out["layers_by_kind"][kind] = ids;
  return out;
}

void print_config(const ModelConfig& c) {
  fmt::print("hidden {}, vocabulary {}, context {}, {}, residual {}\n", c.hidden, c.vocab, c.max_positions,
             activation_name(c.activation), residual_name(c.residual));
  if (any(c, Mixer::kda)) fmt::print("KDA      {} heads x {}\n", c.kda.heads, c.kda.head_dim);
  if (any(c, Mixer::mla))
    fmt::print("MLA      {} heads, latent {} + {}, key {} + {}, value {}, query rank {}{}\n", c.mla.heads,
               c.mla.kv_lora, c.mla.rope, c.mla.nope, c.mla.rope, c.mla.v, c.mla.q_lora,
               c.mla.output_gate ? ", output gate" : "");
  if (c.indexer.heads)
    fmt::print("indexer  {} heads x {}, top {}{}\n", c.indexer.heads, c.indexer.dim, c.indexer.topk,
               c.indexer.pool > 1 ? fmt::format(", keys pooled by {}", c.indexer.pool) : "");
  if (c.moe.experts)
    fmt::print("MoE      {} of {} experts of width {}, shared {}{}\n", c.moe.top_k, c.moe.experts,
               c.moe.intermediate, c.moe.shared_intermediate,
               c.moe.latent ? fmt::format(", in a latent of {}", c.moe.latent) : "");
}

void print_inspection(const Model& model) {
  const ModelConfig& c = model.config();
  const Counts counts = count(model);
  fmt::print("{}: {}, {} layers, {} parameters, {} of them active per token\n",
             model.checkpoint().name(), c.family, c.num_layers(), count_text(counts.parameters),
             count_text(counts.active));
  for (const auto& [kind, ids] : layers_by_kind(c))
    fmt::print("  {:>3} {}: {}\n", ids.size(), kind, ranges(ids));
  print_config(c);
  fmt::print("stored   {} in {} tensors\n", human_bytes(counts.file_bytes), counts.tensors);
  for (const auto& [dtype, bytes] : counts.bytes_by_dtype)
    fmt::print("  {:>10} {}\n", dtype, human_bytes(bytes));
  const std::string unused = model.checkpoint().unused_summary();
  if (!unused.empty()) fmt::print("{}\n", unused);
  for (const std::string& warning : c.warnings) fmt::print("warning: {}\n", warning);
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Flags {
    CommonFlags common;
    bool json = false;
  };
  CLI::App* sub = app.add_subcommand("inspect", "Show what a checkpoint holds, without reading its weights");
  auto flags = std::make_shared<Flags>();
  add_model_flag(*sub, flags->common);
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] {
    const Model model(flags->common.model, choose_kernels("", cpu_features()), {});
    if (flags->json)
      print_json(inspect_json(model));
    else
      print_inspection(model);
  });
}

}  // namespace weft
