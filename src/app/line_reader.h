// One message at a time from a person or a pipe.
//
// On a terminal that understands escapes: editing, history, and a paste of several lines as one message
// (bracketed paste). On other terminals the system's own line mode. From a pipe: lines, no prompt.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "app/terminal.h"

namespace weft {

class LineReader {
 public:
  enum class Status { line, end, interrupt };

  LineReader();
  ~LineReader();
  bool interactive() const { return interactive_; }
  // `line` may hold newlines (pasted, or typed with Alt-Enter). interrupt: Ctrl-C; `line` is what had been
  // typed.
  Status read(const std::string& prompt, std::string& line);

 private:
  Status read_plain(const std::string& prompt, std::string& line);
  Status edit(const std::string& prompt, std::string& line);
  int next_byte();  // negative: no byte, see there
  int escape();     // reads the rest of an escape sequence; a Key
  void take_paste();
  void insert(char byte);
  bool key(int key);  // false: the key does nothing
  void recall(size_t entry);
  void draw();
  void print(std::string_view text);

  bool interactive_ = false, editor_ = false;
  int echo_fd_ = -1;  // where the prompt goes; -1: nowhere
  std::unique_ptr<TerminalMode> mode_;
  std::string pending_;  // bytes read and not yet used
  size_t used_ = 0;

  std::string prompt_, text_, draft_;  // draft_: what was typed before looking at the history
  size_t cursor_ = 0;                  // byte in text_
  int cursor_row_ = 0;                 // below the row of the prompt
  std::vector<std::string> history_;
  size_t entry_ = 0;
};

}  // namespace weft
