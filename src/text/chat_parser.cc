#include "text/chat_parser.h"

namespace weft {

std::vector<ChatEvent> StreamParser::push(std::string_view bytes) {
  buffer_.erase(0, pos_);
  pos_ = 0;
  buffer_ += bytes;
  run();
  return std::exchange(events_, {});
}

std::vector<ChatEvent> StreamParser::finish() {
  ending_ = true;
  run();
  finished();
  if (call_open_) lose_call();
  return std::exchange(events_, {});
}

void StreamParser::run() {
  while (step()) {
  }
}

int StreamParser::scan(std::initializer_list<std::string_view> markers, std::string& before) {
  std::string firsts;
  for (const std::string_view marker : markers) firsts += marker[0];
  const std::string_view text = std::string_view(buffer_).substr(pos_);
  size_t at = 0;
  while ((at = text.find_first_of(firsts, at)) != std::string_view::npos) {
    const std::string_view rest = text.substr(at);
    int number = 0;
    for (const std::string_view marker : markers) {
      if (rest.starts_with(marker)) {
        before = text.substr(0, at);
        pos_ += at + marker.size();
        return number;
      }
      if (!ending_ && marker.starts_with(rest)) {
        before = text.substr(0, at);
        pos_ += at;
        return kNone;
      }
      ++number;
    }
    ++at;
  }
  before = text;
  pos_ = buffer_.size();
  return kNone;
}

void StreamParser::send(ChatEvent event) {
  const bool delta =
      event.kind == Kind::reasoning || event.kind == Kind::content || event.kind == Kind::call_arguments;
  if (delta && event.text.empty()) return;
  if (delta && !events_.empty() && events_.back().kind == event.kind)
    events_.back().text += event.text;
  else
    events_.push_back(std::move(event));
}

void StreamParser::emit(Kind kind, std::string_view text) {
  send({kind, -1, std::string(text), ""});
}

void StreamParser::prose(Kind kind, std::string_view text) {
  const size_t last = text.find_last_not_of(" \t\r\n");
  if (last != std::string_view::npos) {
    settle(kind);
    emit(kind, text.substr(0, last + 1));
    text.remove_prefix(last + 1);
  }
  space_ += text;
}

void StreamParser::settle(Kind kind) {
  emit(kind, std::exchange(space_, {}));
}

void StreamParser::begin_call(std::string_view name, std::string id) {
  if (call_open_) lose_call();
  call_open_ = true;
  first_argument_ = true;
  muted_ = name.empty();
  if (muted_) return;
  if (id.empty()) id = call_id_prefix_ + std::to_string(calls_);
  send({Kind::call_begin, calls_, std::string(name), std::move(id)});
  ++calls_;
}

void StreamParser::call_text(std::string_view json) {
  if (json.empty()) return;
  first_argument_ = false;
  if (!muted_) send({Kind::call_arguments, calls_ - 1, std::string(json), ""});
}

void StreamParser::end_call() {
  if (!muted_) send({Kind::call_end, calls_ - 1, "", ""});
  call_open_ = false;
}

void StreamParser::lose_call() {
  if (!muted_) send({Kind::call_lost, calls_ - 1, "", ""});
  call_open_ = false;
}

void StreamParser::begin_argument(std::string_view key, bool plain_string) {
  plain_ = plain_string;
  waiting_.clear();
  std::string text = (first_argument_ ? "{" : ", ") + json_quote(key) + ": ";
  if (plain_) text += '"';
  call_text(text);
}

void StreamParser::argument_piece(std::string_view text) {
  if (!plain_) {
    waiting_ += text;
    return;
  }
  std::string escaped;
  json_escape_to(escaped, text);
  call_text(escaped);
}

void StreamParser::end_argument() {
  if (plain_)
    call_text("\"");
  else
    end_argument_with(json_or_quoted(waiting_));
}

void StreamParser::end_argument_with(std::string_view json_value) {
  call_text(json_value);
}

void StreamParser::close_arguments() {
  call_text(first_argument_ ? "{}" : "}");
}

Attributes parse_attributes(std::string_view text, bool entities) {
  Attributes attributes;
  for (;;) {
    const size_t open = text.find("=\"");
    if (open == std::string_view::npos) return attributes;
    const size_t close = text.find('"', open + 2);
    if (close == std::string_view::npos) return attributes;
    const std::string_view raw = text.substr(open + 2, close - open - 2);
    std::string value;
    for (size_t i = 0; i < raw.size();) {
      const bool quote = entities && raw.substr(i).starts_with("&quot;");
      const bool ampersand = entities && raw.substr(i).starts_with("&amp;");
      value += quote ? '"' : raw[i];
      i += quote ? 6 : ampersand ? 5 : 1;
    }
    attributes.emplace_back(python_strip(text.substr(0, open)), std::move(value));
    text.remove_prefix(close + 1);
  }
}

std::string_view attribute(const Attributes& attributes, std::string_view name) {
  for (const auto& [key, value] : attributes)
    if (key == name) return value;
  return {};
}

std::string json_or_quoted(std::string_view text) {
  const std::optional<PyJson> value = PyJson::try_parse(text);
  return value ? value->dump() : json_quote(text);
}

}  // namespace weft
