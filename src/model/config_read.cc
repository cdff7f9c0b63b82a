#include "model/config_read.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "base/check.h"

namespace weft {
namespace {

constexpr int64_t kMaxPositions = 1 << 30;

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string found(const Fields& fields, const char* key) {
  const auto entry = fields.json().find(key);
  if (entry == fields.json().end()) return "missing";
  if (entry->is_structured() && entry->size() > 16) return fmt::format("{} entries", entry->size());
  return printable(entry->dump(-1, ' ', false, Json::error_handler_t::replace), 80);
}

// Ids of `key`; empty when absent or null. Each one must be a row of the vocabulary.
std::vector<int> token_ids(const Fields& fields, const char* key, int vocab) {
  if (!fields.has(key)) return {};
  std::vector<int> ids;
  for (int64_t id : fields.integers(key, 0, vocab - 1)) ids.push_back(static_cast<int>(id));
  return ids;
}

void add_missing(std::vector<int>& ids, const std::vector<int>& more) {
  for (int id : more) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
}

void read_special_tokens(const ConfigJson& config, ModelConfig& out) {
  out.eos = {};
  add_missing(out.eos, token_ids(config.text, "eos_token_id", out.vocab));
  if (config.nested) add_missing(out.eos, token_ids(config.top, "eos_token_id", out.vocab));
  auto single = [&](const char* key) {
    // -1 is how some exporters write "none".
    const Fields& source = config.text.has(key) ? config.text : config.top;
    return static_cast<int>(source.integer(key, -1, out.vocab - 1, -1));
  };
  out.bos = single("bos_token_id");
  out.pad = single("pad_token_id");
}

// Vision wrappers carry the key twice, and the two have disagreed in released files.
void read_tying(const ConfigJson& config, ModelConfig& out) {
  constexpr const char* kKey = "tie_word_embeddings";
  const bool in_text = config.text.has(kKey), in_top = config.top.has(kKey);
  out.tie_embeddings = in_text ? config.text.boolean(kKey) : config.top.boolean(kKey, false);
  if (in_text && in_top && config.top.boolean(kKey) != out.tie_embeddings) {
    fail("{} is {} but {} is {}, expected the same word twice: correct the one that is wrong",
         config.top.path(kKey), config.top.boolean(kKey), config.text.path(kKey), out.tie_embeddings);
  }
}

// The tensors' own dtypes decide; the word is only looked at to tell of a file that is odd.
void check_dtype_word(const Fields& fields, ModelConfig& out) {
  static const std::vector<std::string> kKnown = {"bfloat16", "float16", "float32", "float8_e4m3fn", "auto"};
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!fields.has(key)) continue;
    const Json& value = fields.json().at(key);
    std::string word = value.is_string() ? value.get<std::string>() : "";
    if (word.starts_with("torch.")) word.erase(0, 6);
    if (!contains(kKnown, word)) {
      out.warnings.push_back(fmt::format("{} is {}: unknown, ignored (the tensors' own types count)",
                                         fields.path(key), found(fields, key)));
    }
  }
}

// Tensors decide what is quantised; this keeps the lists for the loader's comparison and refuses the one
// thing that tensors do not show: a block size other than the one their scales are applied with.
void read_quantization(const Fields& fields, ModelConfig& out) {
  const auto quantization = fields.optional_object("quantization_config");
  if (!quantization) return;
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"}) {
    if (!quantization->has(key)) continue;
    for (std::string& name : quantization->strings(key)) out.unquantized_modules.push_back(std::move(name));
  }
  if (quantization->has("weight_block_size") &&
      quantization->integers("weight_block_size", 1, kMaxWidth) != std::vector<int64_t>{128, 128}) {
    refuse(*quantization, "weight_block_size", "[128, 128]");
  }
  static const std::vector<std::string> kMethods = {"fp8", "compressed-tensors"};
  if (!contains(kMethods, quantization->string("quant_method", "fp8"))) {
    out.warnings.push_back(
        fmt::format("{} is {}, expected fp8 or compressed-tensors: only the tensors' own types count",
                    quantization->path("quant_method"), found(*quantization, "quant_method")));
  }
}

void read_generation_config(const std::string& where, ModelConfig& out) {
  out.stop = out.eos;
  const auto path = std::filesystem::path(where).replace_filename("generation_config.json");
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    // A broken file is refused, not skipped: without its stop ids a chat runs on to the length limit.
    const Json json = parse_json_file(path.string());
    const Fields fields(json, path.string());
    add_missing(out.stop, token_ids(fields, "eos_token_id", out.vocab));
    if (fields.has("temperature")) out.default_temperature = fields.number("temperature", 0, 100);
    if (fields.has("top_p")) out.default_top_p = fields.number("top_p", 0, 1);
    if (fields.has("top_k")) out.default_top_k = static_cast<int>(fields.integer("top_k", -1, kMaxVocab));
  }
  if (out.stop.empty()) {
    out.warnings.push_back(
        fmt::format("{}: no eos_token_id here or in generation_config.json: answers end only at "
                    "their length limit",
                    where));
  }
}

}  // namespace

ConfigJson open_config(const Json& json, const std::string& where) {
  const Fields top(json, where);
  if (auto text = top.optional_object("text_config")) return {top, *text, true};
  return {top, top, false};
}

bool names_family(const Json& json, const std::vector<std::string>& architectures,
                  const std::vector<std::string>& model_types) {
  if (!json.is_object()) return false;
  const auto list = json.find("architectures");
  const auto type = json.find("model_type");
  const bool has_list = list != json.end() && !list->is_null();
  const bool has_type = type != json.end() && !type->is_null();
  if (has_list) {
    if (!list->is_array() || list->empty() || !list->front().is_string()) return false;
    if (!contains(architectures, list->front().get<std::string>())) return false;
  }
  if (has_type && !(type->is_string() && contains(model_types, type->get<std::string>()))) return false;
  return has_list || has_type;
}

void refuse(const Fields& fields, const char* key, const std::string& expected) {
  fail("{} is {}, expected {}", fields.path(key), found(fields, key), expected);
}

std::string read_word(const Fields& fields, const char* key, const std::vector<std::string>& allowed,
                      const std::string& absent) {
  const std::string word = absent.empty() ? fields.string(key) : fields.string(key, absent);
  if (!contains(allowed, word)) refuse(fields, key, fmt::to_string(fmt::join(allowed, " or ")));
  return word;
}

void expect_off(const Fields& fields, const char* key, const char* why) {
  if (!fields.has(key)) return;
  const Json& value = fields.json().at(key);
  const bool off =
      (value.is_boolean() && !value.get<bool>()) || (value.is_number() && value.get<double>() == 0);
  if (!off) refuse(fields, key, fmt::format("it off or absent: {}", why));
}

int64_t read_alias(const Fields& fields, const std::vector<const char*>& keys, int64_t low, int64_t high) {
  const char* first = nullptr;
  int64_t value = -1;
  for (const char* key : keys) {
    if (!fields.has(key)) continue;
    const int64_t other = fields.integer(key, low, high);
    if (first != nullptr && other != value) {
      refuse(fields, key, fmt::format("{} as in {}", value, fields.path(first)));
    }
    if (first == nullptr) first = key;
    value = other;
  }
  return value;
}

void read_common(const ConfigJson& config, const std::string& where, ModelConfig& out) {
  const Fields& text = config.text;
  out.model_type = config.top.string("model_type", "");
  out.vocab = static_cast<int>(text.integer("vocab_size", 1, kMaxVocab));
  out.hidden = static_cast<int>(text.integer("hidden_size", 1, kMaxWidth));
  out.dense_intermediate = static_cast<int>(text.integer("intermediate_size", 1, kMaxWidth));
  out.layers.resize(text.integer("num_hidden_layers", 1, kMaxLayers));
  out.mtp_layers = static_cast<int>(text.integer("num_nextn_predict_layers", 0, 64, 0));
  out.norm_eps = static_cast<float>(text.number("rms_norm_eps", 1e-12, 0.1));
  // Kimi-Linear names its window model_max_length; where both are written, the model's own word counts.
  const char* window = text.has("max_position_embeddings") || !text.has("model_max_length")
                           ? "max_position_embeddings"
                           : "model_max_length";
  out.max_positions = static_cast<int>(text.integer(window, 1, kMaxPositions));
  read_tying(config, out);
  read_special_tokens(config, out);
  check_dtype_word(config.top, out);
  read_quantization(config.top, out);
  if (config.nested) {
    check_dtype_word(text, out);
    read_quantization(text, out);
  }
  read_generation_config(where, out);
}

}  // namespace weft
