// The part of reading a model's output that all formats share: finding markers in bytes that arrive in any
// pieces, and writing tool calls as JSON text while they grow.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/chat.h"

namespace weft {

class StreamParser : public ChatParser {
 public:
  explicit StreamParser(const ChatRequest& request) : call_id_prefix_(request.call_id_prefix) {}
  std::vector<ChatEvent> push(std::string_view bytes) final;
  std::vector<ChatEvent> finish() final;

 protected:
  using Kind = ChatEvent::Kind;
  static constexpr int kNone = -1;

  // Consumes up to and including the next marker of the format's current state. False: no marker, more bytes
  // needed.
  virtual bool step() = 0;
  virtual void finished() {}  // after the last step: settle what is held back

  // Takes the bytes before the first of `markers` into `before`, removes the marker, returns its number.
  // Without one: kNone, and `before` is all that cannot be the beginning of a marker; at the end of the text,
  // everything. No marker may begin with another.
  int scan(std::initializer_list<std::string_view> markers, std::string& before);

  void emit(Kind kind, std::string_view text);
  // emit() that holds trailing white space back until it is known what follows: before a call it is layout.
  void prose(Kind kind, std::string_view text);
  void settle(Kind kind);  // sends the held white space
  void drop_space() { space_.clear(); }

  // A call without a name is read but not reported. Only one is open at a time; a new one, and finish(), lose
  // it.
  void begin_call(std::string_view name, std::string id = "");
  void call_text(std::string_view json);  // arguments the model itself writes as JSON
  void end_call();
  void lose_call();
  int calls() const { return calls_; }  // reported so far

  // Arguments written one by one. A plain string goes out piece by piece; any other value waits for its end.
  void begin_argument(std::string_view key, bool plain_string);
  void argument_piece(std::string_view text);
  void end_argument();                                  // a value that is JSON, else text
  void end_argument_with(std::string_view json_value);  // a waiting value, as the format wants it spelled
  void close_arguments();                               // the closing brace of the list
  bool plain_argument() const { return plain_; }
  const std::string& waiting_argument() const { return waiting_; }

 private:
  void run();
  void send(ChatEvent event);

  std::string call_id_prefix_;
  std::string buffer_;
  size_t pos_ = 0;  // start of the unread bytes in buffer_
  bool ending_ = false;
  std::vector<ChatEvent> events_;
  std::string space_;
  int calls_ = 0;
  bool call_open_ = false;
  bool muted_ = false;
  bool first_argument_ = true;
  bool plain_ = false;
  std::string waiting_;
};

// The attributes of an opening tag: ` name="x" string="true"`. `entities`: &quot; and &amp; are undone.
using Attributes = std::vector<std::pair<std::string, std::string>>;
Attributes parse_attributes(std::string_view text, bool entities);
std::string_view attribute(const Attributes& attributes, std::string_view name);  // empty when absent

// Model text as a JSON value: itself (spelled as python does) if it is JSON, else a string.
std::string json_or_quoted(std::string_view text);

}  // namespace weft
