#include "model/model.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <set>
#include <string_view>

namespace weft {
namespace {

Json read_config(const Checkpoint& checkpoint) { return parse_json_file(checkpoint.config_path()); }

// "layers.3.self_attn.o_proj": what is left of a module's name when the prefixes that differ between releases are gone.
std::string_view plain_name(std::string_view name) {
  const size_t layers = name.find("layers.");
  return layers == std::string_view::npos ? name : name.substr(layers);
}

// Lists of modules left unquantised are written under other prefixes, shortened or fused; they decide nothing. One that
// names a quantised tensor is worth a word.
void compare_unquantized(const Weights& weights, ModelConfig& config) {
  std::set<std::string_view> listed;
  for (const std::string& entry : config.unquantized_modules) listed.insert(plain_name(entry));
  // A shortened name is what stands behind some dot: few look-ups each, since experts are a quarter of a million.
  const auto names = [&](std::string_view module) {
    for (;;) {
      if (listed.contains(module)) return true;
      const size_t dot = module.find('.');
      if (dot == std::string_view::npos) return false;
      module.remove_prefix(dot + 1);
    }
  };
  int contradictions = 0;
  std::string first;
  for (const Matrix& matrix : weights.matrices)
    for (const TensorInfo* t : matrix.sources) {
      const std::string_view name = t->name;
      if (t->dtype != StoredDtype::f8_e4m3 && !name.ends_with(".weight_packed")) continue;
      if (names(plain_name(name.substr(0, name.rfind('.')))) && contradictions++ == 0) first = t->name;
    }
  if (contradictions)
    config.warnings.push_back(fmt::format(
        "quantization_config lists {} as unquantised, but the file holds it quantised{}: the file counts", first,
        contradictions > 1 ? fmt::format(" (and {} more)", contradictions - 1) : ""));
}

// A tied model reads the embedding as its head, whatever head is stored.
void compare_tied_head(const Checkpoint& checkpoint, const Builder& parts, ModelConfig& config) {
  if (!config.tie_embeddings) return;
  const TensorInfo* table = parts.find("embed_tokens.weight");
  for (const char* name : {"lm_head.weight", "language_model.lm_head.weight"}) {
    const TensorInfo* head = checkpoint.find(name);
    if (!head || !table) continue;
    if (head->dtype != table->dtype || head->bytes != table->bytes || std::memcmp(head->data, table->data, head->bytes) != 0)
      config.warnings.push_back(fmt::format("{} differs from the embedding, but tie_word_embeddings is true: the embedding "
                                            "is the output head", head->name));
  }
}

}  // namespace

Model::Model(const std::string& path, const KernelTable& kernels, const BuildOptions& options) : checkpoint_(path) {
  const Json json = read_config(checkpoint_);
  arch_ = &find_arch(json, checkpoint_.config_path(), &checkpoint_);
  config_ = arch_->read(json, checkpoint_.config_path(), &checkpoint_);
  builder_ = std::make_unique<Builder>(kernels, config_, checkpoint_, options);
  arch_->build(*builder_, config_);
  compare_unquantized(builder_->weights, config_);
  compare_tied_head(checkpoint_, *builder_, config_);
  builder_->graph.plan();
  nonfinite_.resize(builder_->row_capacity(Rows::tokens));
}

CacheShape Model::cache_shape() const {
  const CacheLayout& layout = builder_->caches;
  return {layout.slab_bytes, layout.slot_bytes, layout.slot_bytes == 0};
}

MemoryPlan Model::memory(const CacheLimits& limits, int threads) const {
  const CacheLayout& layout = builder_->caches;
  MemoryPlan plan;
  plan.weights = builder_->weights.bytes();
  plan.latent = layout.latent_bytes * limits.pages;
  plan.index = layout.index_bytes * limits.pages;
  plan.state = layout.slot_bytes * (limits.sequences + limits.checkpoints);
  plan.scratch = builder_->graph.arena_bytes() + kScratchBytes * threads +
                 static_cast<size_t>(builder_->row_capacity(Rows::logits)) * builder_->logits_ld * sizeof(float);
  return plan;
}

void Model::load(Team& team, const std::function<void(const LoadProgress&)>& progress, const PackCacheOptions& cache) {
  builder_->weights.load(checkpoint_, builder_->graph, team, cache, progress);
}

void Model::bind(Caches& caches, Team& team) {
  Graph& graph = builder_->graph;
  const CacheLayout& layout = builder_->caches;
  for (size_t i = 0; i < layout.slabs.size(); ++i)
    graph.bind(layout.slabs[i], caches.paged().slab(static_cast<int>(i)));
  for (const auto& [slot, offset] : layout.states) graph.bind(slot, caches.states().base() + offset);
  logits_ = Buffer(static_cast<size_t>(builder_->row_capacity(Rows::logits)) * builder_->logits_ld * sizeof(float));
  graph.bind(builder_->logits, logits_.data());
  for (const auto& [name, buffer] : builder_->traces) {
    Buffer& memory = traces_[name];
    memory = Buffer(static_cast<size_t>(builder_->row_capacity(buffer.rows)) * buffer.width * sizeof(float) + 64);
    graph.bind(buffer.slot, memory.data());
  }
  arena_ = Buffer(graph.arena_bytes() + 4096);
  graph.patch(arena_.as<std::byte>());
  state_stride_ = caches.states().stride();
  team_ = &team;
  exec(builder_->options.exec);
}

void Model::exec(ExecMode mode) { executor_ = std::make_unique<Executor>(*team_, builder_->graph, mode); }

void Model::run(StepHeader step) {
  WEFT_CHECK(step.tokens <= builder_->options.max_tokens && step.logit_rows <= builder_->options.max_logits,
             "{} tokens, {} logit rows", step.tokens, step.logit_rows);
  std::fill_n(nonfinite_.begin(), step.tokens, INT_MAX);
  step.nonfinite = nonfinite_.data();
  step.state_stride = state_stride_;
  if (builder_->options.poison) std::memset(arena_.data(), 0xff, builder_->graph.arena_bytes());
  executor_->run(step);
}

std::string Model::first_nonfinite(int token) const {
  const int site = nonfinite_[token];
  if (site == INT_MAX) return "";
  if (site == 0) return "the embedding";
  // A norm sees what the sub-layer before it left.
  const int before = site - 1;
  return fmt::format("layer {}, {}", before / 2, before % 2 ? "feed-forward" : "attention");
}

const float* Model::trace(const std::string& name) const {
  const auto it = traces_.find(name);
  WEFT_CHECK(it != traces_.end(), "{}", name);
  return it->second.as<float>();
}
int Model::trace_width(const std::string& name) const { return builder_->traces.at(name).width; }

}  // namespace weft
