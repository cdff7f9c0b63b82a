// weft quantize: a checkpoint with its routed experts in another format, that loads like any other.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "app/cli.h"
#include "app/model_flags.h"
#include "app/report.h"
#include "app/synth.h"
#include "base/check.h"
#include "base/cpu.h"
#include "base/team.h"
#include "kernels/dispatch.h"
#include "model/model.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct QuantizeFlags {
  std::string model, output, tier;
  int threads = 0;
  bool quiet = false;
};

constexpr int kRows = kScaleBlock;  // encoded at a time: one row of blocks

// A tensor of the new file, and how its bytes come about.
struct Written {
  std::string name;
  StoredDtype dtype;
  std::vector<int64_t> shape;
  const TensorInfo* copied = nullptr;  // or the matrix below, codes or scales
  const StoredMatrix* matrix = nullptr;
  bool scales = false;
  size_t bytes() const {
    size_t n = stored_size(dtype);
    for (const int64_t d : shape) n *= static_cast<size_t>(d);
    return n;
  }
};

std::string module_of(const std::string& tensor) {
  return tensor.substr(0, tensor.rfind('.'));
}

// Every expert's matrix that is stored in another format than the tier's, by module name.
std::map<std::string, StoredMatrix> requantised(const Checkpoint& checkpoint, const Tier& tier) {
  std::map<std::string, StoredMatrix> out;
  for (const TensorInfo& t : checkpoint.tensors()) {
    const bool packed = t.name.ends_with(".weight_packed");
    if (!is_routed_expert(t.name) || !(packed || t.name.ends_with(".weight")) || t.shape.size() != 2)
      continue;
    const std::string module = module_of(t.name);
    StoredMatrix m{&t, nullptr, t.shape[0], packed ? 2 * t.shape[1] : t.shape[1]};
    for (const char* name : {".weight_scale", ".weight_scale_inv"})
      if (const TensorInfo* scales = checkpoint.find(module + name)) m.scales = scales;
    if (packed_format(m) == *tier.experts) continue;
    m.target = tier.experts;
    out.emplace(module, m);
  }
  return out;
}

Written codes_of(const std::string& module, const StoredMatrix& m) {
  const bool fp4 = m.target == WeightFormat::mxfp4;
  return {module + (fp4 ? ".weight_packed" : ".weight"),
          code_dtype(*m.target),
          {m.rows, fp4 ? m.columns / 2 : m.columns},
          nullptr,
          &m};
}
Written scales_of(const std::string& module, const StoredMatrix& m) {
  const auto blocks = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
  Written w{module + ".weight_scale", scale_dtype(*m.target), {m.rows, m.columns / 32}, nullptr, &m, true};
  if (m.target == WeightFormat::int8) w.shape = {m.rows};
  if (m.target == WeightFormat::e4m3) w.name += "_inv", w.shape = {blocks(m.rows), blocks(m.columns)};
  return w;
}

std::vector<Written> plan_file(const Checkpoint& checkpoint, std::string_view file,
                               const std::map<std::string, StoredMatrix>& matrices) {
  std::vector<Written> out;
  for (const TensorInfo& t : checkpoint.tensors()) {
    if (t.file != file) continue;
    const auto found = matrices.find(module_of(t.name));
    if (found == matrices.end()) {
      out.push_back({t.name, t.dtype, t.shape, &t});
    } else if (found->second.values == &t) {  // its old scales are left out
      out.push_back(codes_of(found->first, found->second));
      out.push_back(scales_of(found->first, found->second));
    }
  }
  return out;
}

void write_tensor(SafetensorsWriter& writer, const Written& w, const Checkpoint& checkpoint, Team& team) {
  constexpr size_t kPiece = size_t{32} << 20;
  if (w.copied) {
    for (size_t at = 0; at < w.copied->bytes; at += kPiece)
      writer.write(w.copied->data + at, std::min(kPiece, w.copied->bytes - at));
    checkpoint.release(*w.copied);
    return;
  }
  const int64_t blocks = (w.matrix->rows + kRows - 1) / kRows;
  std::vector<EncodedRows> rows(blocks);
  std::vector<std::string> errors(blocks);  // tasks must not throw
  team.run(static_cast<int>(blocks), [&](int b, int) {
    const int64_t first = static_cast<int64_t>(b) * kRows;
    try {
      rows[b] = encode_rows(*w.matrix, first, std::min<int64_t>(kRows, w.matrix->rows - first));
    } catch (const Error& error) {
      errors[b] = error.what();
    }
  });
  for (const std::string& error : errors)
    if (!error.empty()) throw Error(error);
  for (const EncodedRows& block : rows) {
    const std::vector<std::byte>& bytes = w.scales ? block.scales : block.codes;
    writer.write(bytes.data(), bytes.size());
  }
}

void copy_other_files(const fs::path& from, const fs::path& to) {
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file() || name.ends_with(".safetensors") || name == "config.json" ||
        name == "model.safetensors.index.json")
      continue;
    std::error_code error;
    fs::copy_file(entry.path(), to / name, error);
    if (error)
      fail("{}: cannot copy it to {}: {}", printable(entry.path().string()), printable(to.string()),
           error.message());
  }
}

void write_json(const fs::path& path, const Json& json) {
  std::ofstream out(path, std::ios::binary);
  out << json.dump(2) << "\n";
  out.close();
  if (!out) fail("{}: cannot write it: is the disk full, or the folder read-only?", printable(path.string()));
}

// The tensors decide how they are read; the config says it too for other programs, where nothing was
// quantised before (a mixture of methods has no words there).
Json new_config(const Checkpoint& checkpoint, const Tier& tier) {
  const SynthFormat format = tier.experts == WeightFormat::mxfp4  ? SynthFormat::mxfp4
                             : tier.experts == WeightFormat::e4m3 ? SynthFormat::fp8
                                                                  : SynthFormat::bf16;  // no release has such
  Json config = parse_json_file(checkpoint.config_path());
  Json& text = config.contains("text_config") ? config["text_config"] : config;
  if (format != SynthFormat::bf16 && !text.contains("quantization_config") &&
      !config.contains("quantization_config"))
    text["quantization_config"] = quantization_config(format);
  return config;
}

void quantize(const QuantizeFlags& flags) {
  catch_interrupts(2);
  const Notes notes(flags.quiet);
  const Tier tier = read_tier(flags.tier);
  if (!tier.experts)
    usage("--tier {}: changes no weights: choose int8-experts, fp8-experts, mxfp8-experts or fp4-experts",
          flags.tier);
  BuildOptions build;
  build.tier = tier;
  const Model model(flags.model, choose_kernels("", cpu_features()),
                    build);  // its errors: what could not be loaded
  const Checkpoint& checkpoint = model.checkpoint();
  const std::map<std::string, StoredMatrix> matrices = requantised(checkpoint, tier);
  if (matrices.empty())
    usage("{}: has no routed experts that are not {} already", printable(checkpoint.path()),
          format_name(*tier.experts));

  std::map<std::string_view, std::vector<Written>> files;
  size_t before = 0, after = 0, done = 0;
  for (const TensorInfo& t : checkpoint.tensors()) before += t.bytes, files[t.file];
  for (auto& [file, tensors] : files) {
    tensors = plan_file(checkpoint, file, matrices);
    for (const Written& w : tensors) after += w.bytes();
  }
  const fs::path folder = flags.output;
  prepare_model_folder(folder, after);
  checkpoint.check_unchanged();
  Team team(flags.threads > 0 ? flags.threads : default_threads().threads);
  Progress progress(notes, "writing  ");
  Json map = Json::object();
  for (const auto& [file, tensors] : files) {
    if (tensors.empty()) continue;  // it held nothing but scales of other formats
    const std::string name = fs::path(file).filename().string();
    SafetensorsWriter writer(folder / name);
    for (const Written& w : tensors) writer.declare(w.name, w.dtype, w.shape);
    for (const Written& w : tensors) {
      if (interrupted()) throw ExitCode{kExitInterrupted};
      write_tensor(writer, w, checkpoint, team);
      map[w.name] = name;
      done += w.bytes();
      progress.update(static_cast<double>(done) / static_cast<double>(after),
                      fmt::format("{} of {}", human_bytes(done), human_bytes(after)));
    }
    writer.finish();
  }
  progress.clear();
  checkpoint.check_unchanged();
  if (files.size() > 1)
    write_json(folder / "model.safetensors.index.json",
               {{"metadata", {{"total_size", after}}}, {"weight_map", map}});
  copy_other_files(checkpoint.path(), folder);
  write_json(folder / "config.json",
             new_config(checkpoint, tier));  // last: without it the folder is no model
  fmt::print("{}: {} expert matrices in {}; {} instead of {}\n", flags.output, matrices.size(),
             format_name(*tier.experts), human_bytes(after), human_bytes(before));
}

}  // namespace

void add_quantize(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("quantize", "Write a checkpoint whose routed experts are in another format");
  auto flags = std::make_shared<QuantizeFlags>();
  sub->add_option("-m,--model,model", flags->model, "Model folder, or the root of a download cache entry")
      ->type_name("DIR")
      ->required();
  sub->add_option("-o,--output", flags->output, "Folder to write")->type_name("DIR")->required();
  sub->add_option(
         "--tier", flags->tier,
         "int8-experts, fp8-experts, mxfp8-experts, fp4-experts, or a file such as {\"experts\": \"mxfp4\"}")
      ->type_name("NAME")
      ->required();
  sub->add_option("-t,--threads", flags->threads, "Threads")->type_name("N")->check(CLI::Range(1, 4096));
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->callback([flags] { quantize(*flags); });
}

}  // namespace weft
