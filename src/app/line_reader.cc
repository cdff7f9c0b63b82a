#include "app/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace weft {
namespace {

enum Key : int {
  kNone = 0,
  kLeft = 256,
  kRight,
  kUp,
  kDown,
  kHome,
  kEnd,
  kDelete,
  kNewline,
  kPaste,
};

// Not bytes: what next_byte() has to say instead. Again: a signal came, the terminal may have changed.
constexpr int kInputEnded = -1, kInputInterrupted = -2, kInputAgain = -3;

bool continuation(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}
size_t before(const std::string& text, size_t at) {
  if (at > 0) --at;
  while (at > 0 && continuation(text[at])) --at;
  return at;
}
size_t after(const std::string& text, size_t at) {
  if (at < text.size()) ++at;
  while (at < text.size() && continuation(text[at])) ++at;
  return at;
}

// Bracketed paste is on only while a prompt waits, so that no other program inherits it.
constexpr const char* kPasteOn = "\x1b[?2004h";
constexpr const char* kPasteOff = "\x1b[?2004l";

}  // namespace

LineReader::LineReader() {
  const TerminalStyle in = terminal_style(STDIN_FILENO), out = terminal_style(STDOUT_FILENO),
                      err = terminal_style(STDERR_FILENO);
  interactive_ = in.terminal;
  if (!interactive_) return;
  echo_fd_ = out.terminal ? STDOUT_FILENO : err.terminal ? STDERR_FILENO : -1;
  editor_ = echo_fd_ >= 0 && in.escapes;
  if (editor_) mode_ = std::make_unique<TerminalMode>(STDIN_FILENO);
}

LineReader::~LineReader() = default;

LineReader::Status LineReader::read(const std::string& prompt, std::string& line) {
  line.clear();
  return editor_ ? edit(prompt, line) : read_plain(prompt, line);
}

void LineReader::print(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(echo_fd_, text.data(), text.size());
    if (n < 0 && errno != EINTR && errno != EAGAIN) return;  // a terminal that is gone ends the input as well
    if (n > 0) text.remove_prefix(static_cast<size_t>(n));
  }
}

int LineReader::next_byte() {
  if (used_ == pending_.size()) {
    if (interrupted()) return kInputInterrupted;
    char bytes[4096];
    const ssize_t n = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) return interrupted() ? kInputInterrupted : kInputAgain;
    if (n <= 0) return kInputEnded;
    pending_.assign(bytes, static_cast<size_t>(n));
    used_ = 0;
  }
  return static_cast<unsigned char>(pending_[used_++]);
}

LineReader::Status LineReader::read_plain(const std::string& prompt, std::string& line) {
  if (echo_fd_ >= 0) print(prompt);
  for (;;) {
    const int byte = next_byte();
    if (byte == kInputInterrupted) return Status::interrupt;
    if (byte == kInputEnded) return line.empty() ? Status::end : Status::line;
    if (byte == '\n') {
      if (line.ends_with('\r')) line.pop_back();
      return Status::line;
    }
    if (byte >= 0) line += static_cast<char>(byte);
  }
}

int LineReader::escape() {
  // A lone Escape key sends nothing more; the rest of a sequence is there at once or a moment later.
  pollfd more{STDIN_FILENO, POLLIN, 0};
  if (used_ == pending_.size() && ::poll(&more, 1, 50) <= 0) return kNone;
  int byte = next_byte();
  if (byte == '\r' || byte == '\n') return kNewline;
  if (byte != '[' && byte != 'O') return kNone;
  std::string parameters;
  for (byte = next_byte(); byte > 0 && byte < 0x40; byte = next_byte()) parameters += static_cast<char>(byte);
  switch (byte) {
    case 'A':
      return kUp;
    case 'B':
      return kDown;
    case 'C':
      return kRight;
    case 'D':
      return kLeft;
    case 'H':
      return kHome;
    case 'F':
      return kEnd;
    case '~':
      if (parameters == "200") return kPaste;
      if (parameters == "1" || parameters == "7") return kHome;
      if (parameters == "4" || parameters == "8") return kEnd;
      if (parameters == "3") return kDelete;
  }
  return kNone;
}

void LineReader::insert(char byte) {
  text_.insert(cursor_++, 1, byte);
}

void LineReader::take_paste() {
  constexpr std::string_view kEndOfPaste = "\x1b[201~";
  std::string paste;
  for (int byte = next_byte(); byte >= 0 || byte == kInputAgain; byte = next_byte()) {
    if (byte == kInputAgain) continue;
    paste += static_cast<char>(byte);
    if (paste.ends_with(kEndOfPaste)) {
      paste.resize(paste.size() - kEndOfPaste.size());
      break;
    }
  }
  for (size_t i = 0; i < paste.size(); ++i) {
    const auto c = static_cast<unsigned char>(paste[i]);
    if (c == '\r') {
      if (i + 1 == paste.size() || paste[i + 1] != '\n') insert('\n');
    } else if (c >= 0x20 || c == '\n' || c == '\t') {  // a pasted escape sequence must not act
      if (c != 0x7f) insert(paste[i]);
    }
  }
}

void LineReader::recall(size_t entry) {
  if (entry_ == history_.size()) draft_ = text_;
  entry_ = entry;
  text_ = entry_ == history_.size() ? draft_ : history_[entry_];
  cursor_ = text_.size();
}

bool LineReader::key(int key) {
  switch (key) {
    case kLeft:
    case 'B' - '@':
      cursor_ = before(text_, cursor_);
      return true;
    case kRight:
    case 'F' - '@':
      cursor_ = after(text_, cursor_);
      return true;
    case kHome:
    case 'A' - '@':
      cursor_ = 0;
      return true;
    case kEnd:
    case 'E' - '@':
      cursor_ = text_.size();
      return true;
    case kUp:
    case 'P' - '@':
      if (entry_ > 0) recall(entry_ - 1);
      return true;
    case kDown:
    case 'N' - '@':
      if (entry_ < history_.size()) recall(entry_ + 1);
      return true;
    case kDelete:
    case 'D' - '@':
      text_.erase(cursor_, after(text_, cursor_) - cursor_);
      return true;
    case 0x7f:
    case 'H' - '@': {
      const size_t to = before(text_, cursor_);
      text_.erase(to, cursor_ - to);
      cursor_ = to;
      return true;
    }
    case 'U' - '@':
      text_.erase(0, cursor_);
      cursor_ = 0;
      return true;
    case 'K' - '@':
      text_.erase(cursor_);
      return true;
    case 'W' - '@': {
      size_t to = cursor_;
      while (to > 0 && text_[to - 1] == ' ') --to;
      while (to > 0 && text_[to - 1] != ' ' && text_[to - 1] != '\n') --to;
      text_.erase(to, cursor_ - to);
      cursor_ = to;
      return true;
    }
    case 'L' - '@':
      print("\x1b[H\x1b[2J");
      cursor_row_ = 0;
      return true;
    case kNewline:
      insert('\n');
      return true;
    case kPaste:
      take_paste();
      return true;
  }
  return false;
}

// Everything from the prompt on is drawn anew: simple, and right after any change of the terminal's width.
void LineReader::draw() {
  const int columns = terminal_columns(echo_fd_);
  const std::string indent(static_cast<size_t>(display_width(prompt_)), ' ');
  std::string out = cursor_row_ > 0 ? "\r\x1b[" + std::to_string(cursor_row_) + "A" : "\r";
  out += "\x1b[J" + prompt_;
  int row = 0, column = display_width(prompt_), cursor_column = column;
  cursor_row_ = 0;
  for (size_t at = 0;; at = after(text_, at)) {
    if (at == cursor_) {
      cursor_row_ = row;
      cursor_column = column;
    }
    if (at >= text_.size()) break;
    const std::string character = text_.substr(at, after(text_, at) - at);
    if (character == "\n") {
      out += "\r\n" + indent;
      ++row;
      column = static_cast<int>(indent.size());
      continue;
    }
    const int width = character == "\t" ? 1 : display_width(character);
    if (column + width >= columns) {  // never the last column: terminals differ in when they wrap there
      out += "\r\n";
      ++row;
      column = 0;
    }
    out += character == "\t" ? " " : character;
    column += width;
  }
  if (row > cursor_row_) out += "\x1b[" + std::to_string(row - cursor_row_) + "A";
  out += "\r";
  if (cursor_column > 0) out += "\x1b[" + std::to_string(cursor_column) + "C";
  print(out);
}

LineReader::Status LineReader::edit(const std::string& prompt, std::string& line) {
  prompt_ = prompt;
  text_.clear();
  draft_.clear();
  cursor_ = 0;
  cursor_row_ = 0;
  entry_ = history_.size();
  print(kPasteOn);
  const auto leave = [&](Status status) {
    cursor_ = text_.size();
    draw();
    print("\r\n");
    print(kPasteOff);
    line = text_;
    if (status == Status::line && !text_.empty() && (history_.empty() || history_.back() != text_))
      history_.push_back(text_);
    return status;
  };
  for (bool changed = true;;) {
    if (changed && used_ == pending_.size()) draw();
    const int byte = next_byte();
    changed = true;
    if (byte == kInputAgain) {  // back from Ctrl-Z
      print(kPasteOn);
      continue;
    }
    if (byte == kInputInterrupted) return leave(Status::interrupt);
    if (byte == kInputEnded) return leave(Status::end);
    if (byte == '\n' || byte == '\r') return leave(Status::line);
    // Ctrl-D typed in line mode, while the model loaded, is handed over as a zero byte.
    if ((byte == 'D' - '@' || byte == '\0') && text_.empty()) return leave(Status::end);
    if (byte == 0x1b)
      changed = key(escape());
    else if (byte < 0x20 || byte == 0x7f)
      changed = key(byte);
    else
      insert(static_cast<char>(byte));
  }
}

}  // namespace weft
