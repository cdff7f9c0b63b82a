// weft eval overlap: do two settings select the same tokens, and does a selection hold what attention would
// look at?
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "app/eval.h"
#include "app/model_flags.h"
#include "app/report.h"
#include "base/check.h"
#include "base/dtype.h"
#include "text/tokenizer.h"

namespace weft {
namespace {

struct OverlapFlags {
  CommonFlags common;
  std::string file, against;
  int tokens = 4096, rows = 128;
  bool ids = false, json = false, quiet = false;
};

// [layer][token * width]
using Selections = std::vector<std::vector<int32_t>>;

// Softmax weights over all keys, the mean of the heads, of some rows of one layer.
struct DenseRows {
  std::vector<std::vector<float>> weight;  // [row][keys it sees]
};

struct LayerReport {
  int layer = 0, rows = 0;  // rows that had to choose
  double mean = 0, min = 1;
  double mass = 0, min_mass = 1, other_mass = 0, other_min_mass = 1;
  int mass_rows = 0;
};

float operand(const std::byte* row, bool bf16, int i) {
  return bf16 ? bf16_to_float(reinterpret_cast<const uint16_t*>(row)[i])
              : reinterpret_cast<const float*>(row)[i];
}

// What attention over everything would weigh: from the step's own queries and latent rows, in double. Slow on
// purpose: it shares no code with the kernels.
class DenseWeights {
 public:
  DenseWeights(Direct& direct, const SelectingLayer& layer)
      : direct_(direct), layer_(layer), mla_(direct.config().mla), bf16_(direct.kernels().bf16_operands) {}

  // Row `row` of the last step, which sees `keys` keys.
  std::vector<float> row(int row, int keys) const {
    const std::string name = fmt::format("layer.{}.query", layer_.layer);
    const size_t row_bytes = static_cast<size_t>(layer_.row_elements) * direct_.kernels().operand_bytes();
    const auto* queries = reinterpret_cast<const std::byte*>(direct_.model().trace(name)) +
                          static_cast<size_t>(row) * direct_.model().trace_width(name) * 4;
    const int dims = mla_.kv_lora + mla_.rope;
    std::vector<double> logits(static_cast<size_t>(mla_.heads) * keys);
    std::vector<float> key(dims);
    for (int j = 0; j < keys; ++j) {
      const std::byte* latent = latent_row(j);
      read_key(latent, key.data());
      for (int h = 0; h < mla_.heads; ++h) {
        double dot = 0;
        for (int d = 0; d < dims; ++d)
          dot += static_cast<double>(operand(queries + h * row_bytes, bf16_, d)) * key[d];
        logits[static_cast<size_t>(h) * keys + j] = dot * mla_.softmax_scale;
      }
    }
    std::vector<float> mean(keys);
    for (int h = 0; h < mla_.heads; ++h) {
      double* head = logits.data() + static_cast<size_t>(h) * keys;
      const double top = *std::max_element(head, head + keys);
      double sum = 0;
      for (int j = 0; j < keys; ++j) sum += head[j] = std::exp(head[j] - top);
      for (int j = 0; j < keys; ++j) mean[j] += static_cast<float>(head[j] / sum / mla_.heads);
    }
    return mean;
  }

 private:
  const std::byte* latent_row(int position) const {
    PagedCache& paged = direct_.caches().paged();
    const int32_t page = direct_.sequence().block_table()[position / kPageTokens];
    return paged.slab(layer_.slab) + static_cast<size_t>(page) * paged.stride(layer_.slab) +
           position % kPageTokens * latent_row_bytes(layer_.format, mla_.kv_lora, mla_.rope,
                                                     direct_.kernels().operand_bytes());
  }
  // latent | rope of a row as the cache stores it (packed.h: LatentFormat)
  void read_key(const std::byte* row, float* key) const {
    const int latent = mla_.kv_lora, rope = mla_.rope;
    if (layer_.format == LatentFormat::operand) {
      for (int d = 0; d < latent + rope; ++d) key[d] = operand(row, bf16_, d);
      return;
    }
    const std::byte* scales = row + round_up(latent, kCodeLine);
    for (int d = 0; d < latent; ++d) {
      float scale;
      std::memcpy(&scale, scales + d / kScaleBlock * 4, 4);
      key[d] = e4m3_to_float(static_cast<uint8_t>(row[d])) * scale;
    }
    const std::byte* pe = scales + (latent + kScaleBlock - 1) / kScaleBlock * 4;
    for (int d = 0; d < rope; ++d) key[latent + d] = operand(pe, true, d);
  }

  Direct& direct_;
  SelectingLayer layer_;
  const MlaSpec& mla_;
  bool bf16_;
};

// Reads the tokens; selections of every row. `after` follows each step with its first token and length.
Selections select_all(Direct& direct, const std::vector<int32_t>& tokens, const Selections* forced,
                      Progress& progress, const std::function<void(int, int)>& after) {
  const Builder& parts = direct.model().parts();
  const size_t width = parts.selection_width;
  Selections seen(parts.dsa_layers, std::vector<int32_t>(tokens.size() * width));
  for (int at = 0; at < static_cast<int>(tokens.size());) {
    const int n = std::min(direct.chunk(), static_cast<int>(tokens.size()) - at);
    std::vector<int32_t*> see;
    std::vector<const int32_t*> force;
    for (auto& layer : seen) see.push_back(layer.data() + at * width);
    if (forced)
      for (const auto& layer : *forced) force.push_back(layer.data() + at * width);
    direct.forward({tokens.data() + at, static_cast<size_t>(n)}, WantLogits::last, [&](StepHeader& h) {
      h.seen_selection = see.data();
      if (forced) h.forced_selection = force.data();
    });
    if (after) after(at, n);
    at += n;
    if (interrupted()) throw ExitCode{kExitInterrupted};
    progress.update(static_cast<double>(at) / static_cast<double>(tokens.size()),
                    fmt::format("{} of {} tokens", at, tokens.size()));
  }
  return seen;
}

std::span<const int32_t> list_of(const Selections& all, int layer, int row, size_t width) {
  const int32_t* list = all[layer].data() + row * width;
  return {list, static_cast<size_t>(std::find(list, list + width, -1) - list)};
}
double share_of(std::span<const int32_t> a, std::span<const int32_t> b) {  // both ascending
  std::vector<int32_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(a.size());
}
double mass_of(std::span<const int32_t> list, const std::vector<float>& weight) {
  double sum = 0;
  for (const int32_t j : list) sum += weight[j];
  return sum;
}

struct Compared {
  std::vector<LayerReport> layers;
  std::string model, isa;
  int tokens = 0, topk = 0, mass_rows = 0;
};

// Rows at which the weights are looked at: spread evenly over those that have to choose.
std::vector<int> mass_rows(int tokens, int topk, int count) {
  std::vector<int> rows;
  const int from = topk, n = std::min(count, tokens - from);
  for (int i = 0; i < n; ++i)
    rows.push_back(from + static_cast<int>((static_cast<int64_t>(i) * 2 + 1) * (tokens - from) / (2 * n)));
  return rows;
}

std::vector<LayerReport> compare(const std::vector<SelectingLayer>& layers, const Selections& a,
                                 const Selections& b, const std::vector<DenseRows>& dense,
                                 const std::vector<int>& rows, int tokens, int topk, size_t width) {
  std::vector<LayerReport> out;
  for (size_t l = 0; l < layers.size(); ++l) {
    LayerReport r;
    r.layer = layers[l].layer;
    const int index = static_cast<int>(l);
    for (int t = topk; t < tokens; ++t) {
      const double share = share_of(list_of(a, index, t, width), list_of(b, index, t, width));
      r.mean += share, r.min = std::min(r.min, share), ++r.rows;
    }
    r.mean /= std::max(r.rows, 1);
    for (size_t i = 0; i < rows.size(); ++i) {
      const double mine = mass_of(list_of(a, index, rows[i], width), dense[l].weight[i]);
      const double other = mass_of(list_of(b, index, rows[i], width), dense[l].weight[i]);
      r.mass += mine / rows.size(), r.min_mass = std::min(r.min_mass, mine);
      r.other_mass += other / rows.size(), r.other_min_mass = std::min(r.other_min_mass, other);
    }
    r.mass_rows = static_cast<int>(rows.size());
    out.push_back(r);
  }
  return out;
}

// The other setting: the first one's flags, then those of --against.
CommonFlags other_flags(const OverlapFlags& flags) {
  CommonFlags other = flags.common;
  CLI::App parser("--against");
  parser.set_help_flag();  // none
  parser.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_engine_flags(parser, other, false);
  parser.get_option("--model")->required(false);
  try {
    parser.parse(flags.against);
  } catch (const CLI::ParseError& error) {
    usage("--against \"{}\": {}", printable(flags.against), error.what());
  }
  return other;
}

std::vector<int32_t> read_tokens(const OverlapFlags& flags, const ModelConfig& config) {
  std::vector<int32_t> tokens;
  const std::string content = read_prompt_file(flags.file);
  if (flags.ids) {
    tokens = parse_ids(content);
  } else {
    const std::vector<int> ids =
        Tokenizer::load(resolve_model_folder(flags.common.model))->encode(content, Tokenizer::Specials::none);
    tokens.assign(ids.begin(), ids.end());
  }
  for (const int32_t id : tokens)
    if (id < 0 || id >= config.vocab)
      fail("{}: token id {} is outside the vocabulary of {}", printable(flags.file), id, config.vocab);
  if (flags.tokens && static_cast<int>(tokens.size()) > flags.tokens) tokens.resize(flags.tokens);
  return tokens;
}

// The first setting's run: its selections, and the dense weights at `rows`.
Compared run_overlap(const OverlapFlags& flags, const Notes& notes) {
  CommonFlags common = flags.common;
  if (common.context == 0) common.context = flags.tokens;
  CommonFlags other = other_flags(flags);
  if (common.dsa == "dense" || other.dsa == "dense")
    usage("--dsa=dense selects nothing: compare sparse and recent, and see the share of attention for dense");
  Compared out;
  Selections first;
  std::vector<DenseRows> dense;
  std::vector<SelectingLayer> layers;
  std::vector<int32_t> tokens;
  std::vector<int> rows;
  size_t width = 0;
  {
    DirectOptions options;
    options.trace = true;
    const std::unique_ptr<Direct> direct = load_direct(common, notes, options);
    const Builder& parts = direct->model().parts();
    layers = parts.selecting, width = parts.selection_width;
    out.model = direct->model().checkpoint().name(), out.isa = direct->kernels().isa;
    out.topk = direct->config().indexer.topk;
    if (layers.empty()) fail("{}: no layer selects: {} has no indexer", out.model, direct->config().family);
    tokens = read_tokens(flags, direct->config());
    if (static_cast<int>(tokens.size()) > direct->context()) tokens.resize(direct->context());
    if (static_cast<int>(tokens.size()) <= static_cast<int>(width))
      fail("{}: {} tokens, of which every row selects all: give more than {}", printable(flags.file),
           tokens.size(), width);
    // A pooled list holds up to pool - 1 tokens more than top-k: behind width every row chooses.
    rows = mass_rows(static_cast<int>(tokens.size()), static_cast<int>(width), flags.rows);
    dense.resize(layers.size());
    for (DenseRows& d : dense) d.weight.resize(rows.size());
    Progress progress(notes, "reading  ");
    first = select_all(*direct, tokens, nullptr, progress, [&](int at, int n) {
      const auto from = std::lower_bound(rows.begin(), rows.end(), at) - rows.begin();
      const auto to = std::lower_bound(rows.begin(), rows.end(), at + n) - rows.begin();
      for (size_t l = 0; l < layers.size(); ++l) {
        const DenseWeights weights(*direct, layers[l]);
        direct->team().run(static_cast<int>(to - from), [&](int i, int) {
          dense[l].weight[from + i] = weights.row(rows[from + i] - at, rows[from + i] + 1);
        });
      }
    });
    progress.clear();
  }
  if (other.context == 0) other.context = common.context;
  const std::unique_ptr<Direct> direct = load_direct(other, notes, {});
  if (static_cast<size_t>(direct->model().parts().selection_width) != width ||
      direct->model().parts().selecting.size() != layers.size())
    fail("--against: {} selects {} rows in {} layers, {} {} in {}", other.model,
         direct->model().parts().selection_width, direct->model().parts().selecting.size(), out.model, width,
         layers.size());
  Progress progress(notes, "comparing");
  // The first run's choices are forced on the second: it chooses under the same past, layer by layer.
  const Selections second = select_all(*direct, tokens, &first, progress, {});
  progress.clear();
  out.tokens = static_cast<int>(tokens.size()), out.mass_rows = static_cast<int>(rows.size());
  out.layers = compare(layers, first, second, dense, rows, out.tokens, static_cast<int>(width), width);
  return out;
}

void print_overlap(const OverlapFlags& flags, const Compared& c) {
  fmt::print("{}: {} tokens, top {}, {}; against \"{}\"\n\n", c.model, c.tokens, c.topk, c.isa,
             flags.against);
  fmt::print("| {:<5} | {:>12} | {:>11} | {:>14} | {:>8} | {:>18} | {:>8} |\n", "layer", "mean overlap",
             "min overlap", "attention mass", "min mass", "mass, the other's", "min mass");
  fmt::print("| :{0:-<4} | {0:->11}: | {0:->10}: | {0:->13}: | {0:->7}: | {0:->17}: | {0:->7}: |\n", "");
  for (const LayerReport& r : c.layers)
    fmt::print("| {:<5} | {:>12.4f} | {:>11.4f} | {:>14.4f} | {:>8.4f} | {:>18.4f} | {:>8.4f} |\n", r.layer,
               r.mean, r.min, r.mass, r.min_mass, r.other_mass, r.other_min_mass);
  fmt::print(
      "\noverlap over {} rows that see more than they may select, attention mass (mean of the heads, softmax "
      "over all keys) at {} of them\n",
      c.layers[0].rows, c.mass_rows);
}

Json overlap_json(const OverlapFlags& flags, const Compared& c) {
  Json layers = Json::array();
  for (const LayerReport& r : c.layers)
    layers.push_back({{"layer", r.layer},
                      {"mean_overlap", r.mean},
                      {"min_overlap", r.min},
                      {"rows", r.rows},
                      {"mean_mass", r.mass},
                      {"min_mass", r.min_mass},
                      {"other_mean_mass", r.other_mass},
                      {"other_min_mass", r.other_min_mass},
                      {"mass_rows", r.mass_rows}});
  return {{"model", c.model},   {"isa", c.isa},   {"dsa", flags.common.dsa}, {"against", flags.against},
          {"tokens", c.tokens}, {"topk", c.topk}, {"layers", layers}};
}

}  // namespace

void add_eval_overlap(CLI::App& eval) {
  CLI::App* sub = eval.add_subcommand(
      "overlap", "Compare what two settings select, and the share of attention inside the selections");
  auto flags = std::make_shared<OverlapFlags>();
  add_engine_flags(*sub, flags->common, false);
  sub->add_option("file", flags->file, "Plain text")->type_name("FILE")->required();
  sub->add_option("--against", flags->against,
                  "The other setting, as flags in one word: \"--dsa=recent\" (default: the same again)")
      ->type_name("FLAGS");
  sub->add_option("--tokens", flags->tokens, "Of the text (default: 4096)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_option("--rows", flags->rows, "Rows whose attention mass is computed (default: 128)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_flag("--ids", flags->ids, "The file is token ids, as in \"1 2 3\"; needs no tokenizer");
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] {
    catch_interrupts(2);
    const Compared compared = run_overlap(*flags, Notes(flags->quiet));
    if (flags->json)
      print_json(overlap_json(*flags, compared));
    else
      print_overlap(*flags, compared);
  });
}

}  // namespace weft
