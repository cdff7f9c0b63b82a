#include "engine/golden.h"

#include <algorithm>

#include "base/check.h"

namespace weft {

double number_at(const Json& json, std::initializer_list<const char*> path) {
  const Json* at = &json;
  for (const char* key : path) {
    if (!at->is_object() || !at->contains(key)) return -1;
    at = &(*at)[key];
  }
  return at->is_number() ? at->get<double>() : -1;
}

GoldenFile::GoldenFile(const std::string& directory)
    : json_(parse_json_file(directory + "/golden.json")),
      where_(directory + "/golden.json"),
      file_(directory + "/golden.safetensors") {
  if (!json_.is_object() || !json_.contains("cases") || !json_["cases"].is_array())
    fail("{}: cases: expected an array", where_);
}

int GoldenFile::longest() const {
  int longest = 1;
  for (const Json& c : cases())
    longest = std::max(longest, static_cast<int>(tensor(Fields(c, where_ + ": cases").string("ids")).elements()));
  return longest;
}

const TensorInfo& GoldenFile::tensor(const std::string& name) const {
  for (const TensorInfo& t : file_.tensors())
    if (t.name == name) return t;
  fail("{}: tensor {} is missing, though golden.json names it", file_.path(), name);
}

GoldenInts GoldenFile::ints(const std::string& name) const {
  const TensorInfo& t = tensor(name);
  if (t.dtype != StoredDtype::i32 && t.dtype != StoredDtype::i64)
    fail("{}: {}: dtype {}, expected I32", file_.path(), name, stored_name(t.dtype));
  GoldenInts out{t.shape, std::vector<int32_t>(t.elements())};
  if (t.dtype == StoredDtype::i32) {
    read_elements(t, 0, t.elements(), out.data.data());
  } else {
    std::vector<int64_t> wide(t.elements());
    read_elements(t, 0, t.elements(), wide.data());
    std::copy(wide.begin(), wide.end(), out.data.begin());
  }
  return out;
}

std::vector<float> GoldenFile::floats(const std::string& name) const {
  const TensorInfo& t = tensor(name);
  std::vector<float> out(t.elements());
  read_f32(t, 0, t.elements(), out.data());
  return out;
}

GoldenRunner::GoldenRunner(const std::string& directory, const KernelTable& kernels, int threads, BuildOptions build)
    : golden_(directory), kernels_(kernels), team_(threads, false, kernels.thread_init) {
  const int longest = golden_.longest(), context = longest + 64;
  build.max_tokens = build.max_logits = longest;
  model_ = std::make_unique<Model>(directory, kernels_, build);
  const CacheLimits limits{pages_for(context) * 2, 2, 1, context};
  caches_ = std::make_unique<Caches>(model_->cache_shape(), limits);
  model_->load(team_, {});
  model_->bind(*caches_, team_);
  batch_ = std::make_unique<Batch>(longest, longest, 2, context);
}

template <class F>
void GoldenRunner::forward(std::span<const int32_t> ids, WantLogits want, const F& prepare) {
  WEFT_CHECK(sequence_.can_extend(static_cast<int>(ids.size())));
  sequence_.extend(static_cast<int>(ids.size()));
  batch_->clear();
  batch_->add(sequence_, ids, want);
  prepare(batch_->header());
  model_->run(batch_->header());
  sequence_.commit(static_cast<int>(ids.size()));
}

GoldenCase GoldenRunner::read_case(const Json& json) const {
  const Fields f(json, "golden.json: cases");
  GoldenCase c;
  c.name = f.string("name");
  c.ids = golden_.ints(f.string("ids")).data;
  c.logits = golden_.floats(f.string("logits"));
  for (const int32_t id : c.ids)
    if (id < 0 || id >= model_->config().vocab)
      fail("golden.json: case {}: token id {} is outside the vocabulary of {}", c.name, id, model_->config().vocab);
  if (c.logits.size() != c.ids.size() * model_->config().vocab)
    fail("golden.json: case {}: {} logits for {} tokens of a vocabulary of {}", c.name, c.logits.size(), c.ids.size(),
         model_->config().vocab);
  if (f.has("greedy")) c.greedy = golden_.ints(f.string("greedy")).data;
  c.bf16_drift = number_at(json, {"bf16_activations_max_abs_diff"});
  if (f.has("experts")) read_experts(c, golden_.ints(f.string("experts")));
  if (f.has("selected") && model_->parts().options.dsa == DsaMode::sparse) read_selected(c, json["selected"]);
  return c;
}

GoldenRun GoldenRunner::run(const GoldenCase& c, int chunk, bool forced) {
  const Builder& parts = model_->parts();
  const int tokens = static_cast<int>(c.ids.size()), k = model_->config().moe.top_k, width = parts.selection_width;
  const int step = chunk > 0 ? std::min(chunk, tokens) : tokens;
  GoldenRun seen;
  seen.experts.assign(parts.moe_layers, std::vector<int32_t>(static_cast<size_t>(tokens) * k));
  seen.selected.assign(parts.dsa_layers, std::vector<int32_t>(static_cast<size_t>(tokens) * width));
  seen.logits.resize(c.logits.size());
  sequence_ = caches_->create();
  for (int at = 0; at < tokens; at += step) {
    const int n = std::min(step, tokens - at);
    const auto from = [at](const std::vector<std::vector<int32_t>>& v, int per_row) {
      std::vector<const int32_t*> out;
      for (const auto& layer : v) out.push_back(layer.data() + static_cast<size_t>(at) * per_row);
      return out;
    };
    const auto force_experts = from(c.experts, k), force_selected = from(c.selected, width);
    std::vector<int32_t*> see_experts, see_selected;
    for (auto& layer : seen.experts) see_experts.push_back(layer.data() + static_cast<size_t>(at) * k);
    for (auto& layer : seen.selected) see_selected.push_back(layer.data() + static_cast<size_t>(at) * width);
    forward({c.ids.data() + at, static_cast<size_t>(n)}, WantLogits::all, [&](StepHeader& h) {
      h.seen_experts = see_experts.data();
      h.seen_selection = see_selected.data();
      if (forced && !c.experts.empty()) h.forced_experts = force_experts.data();
      if (forced && !c.selected.empty()) h.forced_selection = force_selected.data();
    });
    const size_t vocab = model_->config().vocab;
    for (int i = 0; i < n; ++i) std::copy_n(model_->logits(i), vocab, seen.logits.begin() + (at + i) * vocab);
  }
  return seen;
}

int GoldenRunner::greedy(const GoldenCase& c, const std::vector<float>& logits) {
  const int vocab = model_->config().vocab;
  const auto best = [vocab](const float* row) {
    return static_cast<int32_t>(std::max_element(row, row + vocab) - row);
  };
  int32_t token = best(logits.data() + logits.size() - vocab);
  int wrong = 0;
  for (size_t i = 0; i < c.greedy.size(); ++i) {
    wrong += token != c.greedy[i];
    if (i + 1 == c.greedy.size() || !sequence_.can_extend(1)) break;
    forward({&token, 1}, WantLogits::last, [](StepHeader&) {});
    token = best(model_->logits(0));
  }
  return wrong;
}

void GoldenRunner::read_experts(GoldenCase& c, const GoldenInts& t) const {
  const int64_t tokens = static_cast<int64_t>(c.ids.size()), layers = model_->parts().moe_layers,
                k = model_->config().moe.top_k;
  if (t.shape.size() != 3 || t.shape[2] != k ||
      !((t.shape[0] == layers && t.shape[1] == tokens) || (t.shape[0] == tokens && t.shape[1] == layers)))
    fail("golden.json: case {}: experts have shape {}", c.name, shape_text(t.shape));
  const bool layer_first = t.shape[0] == layers && (layers != tokens || !golden_.json().contains("kind"));
  c.experts.assign(layers, std::vector<int32_t>(tokens * k));
  for (int64_t l = 0; l < layers; ++l)
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j < k; ++j)
        c.experts[l][i * k + j] = t.data[(layer_first ? l * tokens + i : i * layers + l) * k + j];
}

void GoldenRunner::read_selected(GoldenCase& c, const Json& by_layer) const {
  const int width = model_->parts().selection_width;
  std::vector<std::pair<int, std::string>> layers;  // in layer order
  for (const auto& [layer, name] : by_layer.items()) layers.emplace_back(std::stoi(layer), name.get<std::string>());
  std::sort(layers.begin(), layers.end());
  if (static_cast<int>(layers.size()) != model_->parts().dsa_layers)
    fail("golden.json: case {}: {} selected sets for {} indexers", c.name, layers.size(), model_->parts().dsa_layers);
  for (const auto& [layer, name] : layers) {
    const GoldenInts t = golden_.ints(name);
    const int tokens = static_cast<int>(c.ids.size()), columns = static_cast<int>(t.shape.at(1));
    std::vector<int32_t> rows(static_cast<size_t>(tokens) * width, -1);
    for (int i = 0; i < tokens; ++i) {
      int n = 0;
      for (int j = 0; j < columns; ++j)
        if (const int32_t p = t.data[static_cast<size_t>(i) * columns + j]; p >= 0) {
          if (n == width || p > i) fail("golden.json: case {}: selected set of row {} does not fit", c.name, i);
          rows[static_cast<size_t>(i) * width + n++] = p;
        }
    }
    c.selected.push_back(std::move(rows));
  }
}

}  // namespace weft
