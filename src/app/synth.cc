#include "app/synth.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>

#include "app/cli.h"
#include "app/synth_fill.h"
#include "base/check.h"
#include "base/cpu.h"
#include "base/team.h"
#include "text/tokenizer.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json", "tiktoken.model", "tokenizer_config.json"};

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) fail("{}: cannot write it: is the disk full, or the folder read-only?", printable(path.string()));
}

void copy_tokenizer(const std::string& from, const fs::path& to, int vocab) {
  const auto tokenizer = Tokenizer::load(from);
  if (tokenizer->vocab_size() > vocab)
    usage("--tokenizer {}: has ids up to {}, but --vocab is {}", printable(from), tokenizer->vocab_size() - 1,
          vocab);
  for (const char* name : kTokenizerFiles) {
    std::error_code error;
    if (!fs::exists(fs::path(from) / name)) continue;
    fs::copy_file(fs::path(from) / name, to / name, fs::copy_options::overwrite_existing, error);
    if (error)
      fail("{}: cannot copy it to {}: {}", (fs::path(from) / name).string(), to.string(), error.message());
  }
}

struct Piece {
  std::shared_ptr<const SynthFiller> filler;
  size_t first, bytes, at;  // of the tensor; in the buffer
};

void write_shard(const std::string& path, std::span<const SynthTensor> tensors, uint64_t seed, Team& team) {
  constexpr size_t kBuffer = size_t{32} << 20;
  SafetensorsWriter writer(path);
  for (const SynthTensor& t : tensors) writer.declare(t.name, t.dtype, t.shape);
  std::vector<std::byte> buffer(kBuffer);
  std::vector<Piece> pieces;
  size_t used = 0;
  const auto flush = [&] {
    team.run(static_cast<int>(pieces.size()), [&](int i, int) {
      const Piece& p = pieces[i];
      p.filler->fill(p.first, p.bytes, buffer.data() + p.at);
    });
    writer.write(buffer.data(), used);
    pieces.clear();
    used = 0;
  };
  SynthTables tables;
  for (const SynthTensor& t : tensors) {
    const auto filler = std::make_shared<const SynthFiller>(t, seed, tables);
    const size_t bytes = t.bytes();
    for (size_t first = 0; first < bytes; first += SynthFiller::kPiece) {
      const size_t n = std::min(SynthFiller::kPiece, bytes - first);
      if (used + n > kBuffer) flush();
      pieces.push_back({filler, first, n, used});
      used += n;
    }
  }
  flush();
  writer.finish();
}

// [first, last) tensors of each file
std::vector<std::pair<size_t, size_t>> cut_shards(const std::vector<SynthTensor>& tensors,
                                                  size_t shard_bytes) {
  std::vector<std::pair<size_t, size_t>> shards;
  size_t begin = 0, bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    bytes += tensors[i].bytes();
    if (bytes < shard_bytes && i + 1 < tensors.size()) continue;
    shards.emplace_back(begin, i + 1);
    begin = i + 1;
    bytes = 0;
  }
  return shards;
}

}  // namespace

void prepare_model_folder(const fs::path& folder, size_t bytes) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!fs::is_directory(folder))
    fail("{}: cannot make this folder: {}", printable(folder.string()),
         error ? error.message() : "a file is there");
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".index.json"))
      usage("-o {}: already holds {}; choose another folder, or delete it", printable(folder.string()),
            printable(name));
  }
  const fs::space_info space = fs::space(folder, error);
  if (!error && space.available < bytes)
    fail("{}: the model needs {:.2f} GB but only {:.2f} GB are free there", printable(folder.string()),
         bytes / 1e9, static_cast<double>(space.available) / 1e9);
}

SynthReport synthesize(const SynthSpec& spec, const std::string& directory, const std::string& tokenizer,
                       int threads) {
  check_synth(spec);
  const std::vector<SynthTensor> tensors = synth_tensors(spec);
  SynthReport report;
  for (const SynthTensor& t : tensors) report.bytes += t.bytes();
  report.parameters = synth_parameters(tensors);
  const fs::path folder = directory;
  prepare_model_folder(folder, report.bytes);
  if (!tokenizer.empty()) copy_tokenizer(tokenizer, folder, spec.vocab);

  Team team(threads > 0 ? threads : default_threads().threads);
  const auto shards = cut_shards(tensors, spec.shard_bytes);
  report.files = static_cast<int>(shards.size());
  Json map = Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto [first, last] = shards[i];
    const std::string name = shards.size() == 1
                                 ? "model.safetensors"
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_shard(folder / name, std::span(tensors).subspan(first, last - first), spec.seed, team);
    for (size_t t = first; t < last; ++t) map[tensors[t].name] = name;
  }
  if (shards.size() > 1) {
    const Json index = {{"metadata", {{"total_size", report.bytes}}}, {"weight_map", map}};
    write_text(folder / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  write_text(folder / "config.json", synth_config(spec).dump(2) + "\n");
  return report;
}

namespace {

struct SizeFlag {
  const char* name;
  int SynthSpec::*field;
  const char* help;
};

constexpr SizeFlag kSizes[] = {
    {"--vocab", &SynthSpec::vocab, "Vocabulary"},
    {"--hidden", &SynthSpec::hidden, "Hidden width"},
    {"--layers", &SynthSpec::layers, "Decoder layers"},
    {"--max-positions", &SynthSpec::max_positions, "Context the config promises"},
    {"--full-every", &SynthSpec::full_every, "One MLA layer in so many, the others KDA"},
    {"--heads", &SynthSpec::heads, "Attention heads (KDA too, unless --kda-heads)"},
    {"--kda-heads", &SynthSpec::kda_heads, "KDA heads"},
    {"--kda-head-dim", &SynthSpec::kda_head_dim, "KDA key and value size"},
    {"--q-lora", &SynthSpec::q_lora, "Query rank"},
    {"--kv-lora", &SynthSpec::kv_lora, "Latent width"},
    {"--nope", &SynthSpec::nope, "Content part of a key head"},
    {"--rope", &SynthSpec::rope, "Position part of a key head"},
    {"--v-dim", &SynthSpec::v, "Value head"},
    {"--index-heads", &SynthSpec::index_heads, "Indexer heads"},
    {"--index-dim", &SynthSpec::index_dim, "Indexer key size"},
    {"--index-topk", &SynthSpec::index_topk, "Tokens an indexer selects"},
    {"--index-pool", &SynthSpec::index_pool, "Tokens per index key"},
    {"--index-every", &SynthSpec::index_every, "One indexer for so many DSA layers"},
    {"--dense-layers", &SynthSpec::dense_layers, "Layers without experts, at the beginning"},
    {"--intermediate", &SynthSpec::intermediate, "Width of a dense feed-forward"},
    {"--experts", &SynthSpec::experts, "Routed experts"},
    {"--top-k", &SynthSpec::top_k, "Experts per token"},
    {"--groups", &SynthSpec::groups, "Expert groups"},
    {"--top-groups", &SynthSpec::top_groups, "Expert groups per token"},
    {"--expert-width", &SynthSpec::expert_width, "Width of an expert"},
    {"--shared-experts", &SynthSpec::shared_experts, "Shared experts"},
    {"--latent", &SynthSpec::latent, "Width the experts work on"},
    {"--attn-res-block", &SynthSpec::attn_res_block, "Layers per Attention Residuals block"},
    {"--hc-streams", &SynthSpec::hc_streams, "Hyper-connection streams"},
};

struct SynthFlags {
  std::string family, preset, directory, dtype, tokenizer;
  std::map<std::string, int> sizes;
  std::map<std::string, CLI::Option*> given;
  uint64_t seed = 0;
  int threads = 0;
};

SynthSpec wanted_spec(const SynthFlags& flags) {
  if (flags.family.empty() == flags.preset.empty()) usage("weft synth: give either a family or --preset");
  SynthSpec spec = flags.preset.empty() ? synth_defaults(flags.family) : synth_preset(flags.preset);
  const SynthSpec defaults = synth_defaults(spec.family);
  for (const SizeFlag& size : kSizes) {
    if (flags.given.at(size.name)->count() == 0) continue;
    const int value = flags.sizes.at(size.name);
    if (value != 0 && defaults.*size.field == 0 && size.field != &SynthSpec::kda_heads)
      usage("{} {}: {} has no such thing", size.name, value, spec.family);
    spec.*size.field = value;
  }
  if (!flags.dtype.empty()) spec.format = synth_format(flags.dtype);
  spec.seed = flags.seed;
  return spec;
}

void run_synth(const SynthFlags& flags) {
  const SynthSpec spec = wanted_spec(flags);
  const auto start = std::chrono::steady_clock::now();
  const SynthReport report = synthesize(spec, flags.directory, flags.tokenizer, flags.threads);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{}: {}, {:.1f} M parameters, {:.3f} GB in {} file{}, {:.0f} MB/s\n", flags.directory,
             spec.family, report.parameters / 1e6, report.bytes / 1e9, report.files,
             report.files == 1 ? "" : "s", report.bytes / 1e6 / std::max(seconds, 1e-6));
}

}  // namespace

void add_synth(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("synth", "Write a checkpoint of random weights in a released format");
  auto flags = std::make_shared<SynthFlags>();
  std::string families, presets;
  for (const std::string& name : synth_families()) families += (families.empty() ? "" : ", ") + name;
  for (const std::string& name : synth_presets()) presets += (presets.empty() ? "" : ", ") + name;
  sub->add_option("family", flags->family, "One of " + families)->type_name("FAMILY");
  sub->add_option("--preset", flags->preset, "One of " + presets)->type_name("NAME");
  sub->add_option("-o,--output", flags->directory, "Folder to write")->type_name("DIR")->required();
  sub->add_option("--dtype", flags->dtype, "bf16, fp8 (GLM, DeepSeek) or mxfp4 (experts of Kimi-K3)")
      ->type_name("NAME");
  sub->add_option("--seed", flags->seed, "Equal seeds give equal bytes (default: 0)")->type_name("N");
  sub->add_option("--tokenizer", flags->tokenizer, "Folder whose tokenizer files are copied")
      ->type_name("DIR");
  sub->add_option("-t,--threads", flags->threads, "Threads")->type_name("N")->check(CLI::Range(1, 4096));
  for (const SizeFlag& size : kSizes)
    flags->given[size.name] = sub->add_option(size.name, flags->sizes[size.name], size.help)
                                  ->type_name("N")
                                  ->check(CLI::Range(0, 1 << 24))
                                  ->group("Sizes (default: the family's bench preset)");
  sub->callback([flags] { run_synth(*flags); });
}

}  // namespace weft
