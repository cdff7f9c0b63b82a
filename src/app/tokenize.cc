// weft tokenize: text to token ids and back.
#include <fmt/ranges.h>
#include <unistd.h>

#include "app/cli.h"
#include "app/model_flags.h"
#include "base/check.h"
#include "base/json.h"
#include "model/checkpoint.h"
#include "text/python_json.h"
#include "text/tokenizer.h"

namespace weft {
namespace {

struct TokenizeFlags {
  CommonFlags common;
  std::string text, file;
  bool has_text = false, has_file = false;
  bool special = false, json = false, decode = false;
};

void decode(const Tokenizer& tokenizer, const std::string& text, Output& out) {
  const std::vector<int32_t> ids = parse_ids(text);
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= tokenizer.vocab_size())
      usage("token id {} at position {} is outside the tokenizer's 0..{}", ids[i], i,
            tokenizer.vocab_size() - 1);
  out.write(tokenizer.decode(ids));
  // Bytes for a program, a line for a person.
  if (terminal_style(STDOUT_FILENO).terminal) out.end_line();
}

void encode(const Tokenizer& tokenizer, const std::string& text, const TokenizeFlags& flags, Output& out) {
  using Specials = Tokenizer::Specials;
  const std::vector<int> ids = tokenizer.encode(text, flags.special ? Specials::all : Specials::none);
  std::string line;
  if (flags.json) {
    std::string pieces;
    for (const int id : ids)
      pieces += (pieces.empty() ? "" : ", ") + json_quote(tokenizer.decode(std::span(&id, 1)));
    line = fmt::format("{{\"count\": {}, \"ids\": [{}], \"pieces\": [{}]}}", ids.size(), fmt::join(ids, ", "),
                       pieces);
  } else {
    line = fmt::format("{}", fmt::join(ids, " "));
  }
  out.write(line + "\n");
}

void tokenize(const TokenizeFlags& flags) {
  if (flags.has_text && flags.has_file) usage("-p and -f: give the text once");
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(resolve_model_folder(flags.common.model));
  const std::string text = flags.has_text   ? flags.text
                           : flags.has_file ? read_prompt_file(flags.file)
                                            : read_all(STDIN_FILENO, "stdin");
  Output out;
  if (flags.decode) {
    decode(*tokenizer, text, out);
  } else {
    encode(*tokenizer, text, flags, out);
  }
}

}  // namespace

void add_tokenize(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("tokenize", "Turn text into token ids, or back");
  auto flags = std::make_shared<TokenizeFlags>();
  add_model_flag(*sub, flags->common);
  CLI::Option* text =
      sub->add_option("-p,--prompt", flags->text, "The text (default: read from stdin)")->type_name("TEXT");
  CLI::Option* file =
      sub->add_option("-f,--file", flags->file, "Read the text from a file, as it is")->type_name("FILE");
  sub->add_flag("--special", flags->special, "Recognise the names of special tokens");
  sub->add_flag("--json", flags->json, "Print an object with count, ids and the text of each token");
  sub->add_flag("--decode", flags->decode, "The input is token ids, as in \"1 2 3\": print their text");
  sub->callback([flags, text, file] {
    flags->has_text = text->count() > 0;
    flags->has_file = file->count() > 0;
    tokenize(*flags);
  });
}

}  // namespace weft
