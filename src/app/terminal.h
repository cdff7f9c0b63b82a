// What the program says to a person, and how it is interrupted.
//
// Escape bytes go only to terminals that say in TERM that they understand them (not unset, not "dumb"),
// colours only where NO_COLOR is not set as well. Everything else gets plain lines.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

struct TerminalStyle {
  bool terminal = false;  // a person reads this
  bool escapes = false;   // cursor movement
  bool color = false;     // dim, bold
};
TerminalStyle terminal_style(int fd);
int terminal_columns(int fd);              // 80 when unknown
int display_width(std::string_view text);  // columns of UTF-8 text without control characters

// Standard output as a stream of bytes that must all arrive. Not buffered: text shows when it is made.
class Output {
 public:
  void write(std::string_view bytes);   // error: the system's reason (no space left on device)
  void style(std::string_view escape);  // the same for bytes that do not show
  // Nobody reads any more. Asked between tokens, since a model may put out tokens without text for long.
  bool reader_gone() const;
  bool line_open() const { return line_open_; }  // the last byte written was not a newline
  void end_line() {
    if (line_open_) write("\n");
  }

 private:
  const bool terminal_ = terminal_style(1).terminal;
  bool line_open_ = false;
};

// Lines on stderr; `quiet` swallows them. One call is one write.
class Notes {
 public:
  explicit Notes(bool quiet) : quiet_(quiet) {}
  bool quiet() const { return quiet_; }
  void line(const std::string& text) const;
  void warning(const std::string& text) const;  // shown even when quiet

 private:
  bool quiet_;
};

// A bar on stderr that redraws itself on a terminal; elsewhere a line now and then. Nothing at all when the
// work is done before anyone would look.
class Progress {
 public:
  Progress(const Notes& notes, std::string label);
  ~Progress() { clear(); }
  // `detail` follows the percentage: "1.2 of 2.8 GiB".
  void update(double fraction, const std::string& detail);
  void clear();  // takes the bar away, so that other text can follow
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  const Notes* notes_;
  std::string label_;
  TerminalStyle style_;
  Clock::time_point start_ = Clock::now(), shown_ = start_;
  bool drawn_ = false;
};

// Ctrl-C sets a flag that loops look at; the `presses`-th one that nobody has taken ends the program with
// 130.
void catch_interrupts(int presses);
bool interrupted();
void forget_interrupts();  // the flag was acted upon

// Turns off line mode and echo of terminal `fd` for as long as it lives, and puts everything back also when a
// signal stops or ends the program. Ctrl-C stays a signal. At most one at a time.
class TerminalMode {
 public:
  explicit TerminalMode(int fd);
  ~TerminalMode();
  TerminalMode(const TerminalMode&) = delete;
  TerminalMode& operator=(const TerminalMode&) = delete;
};

}  // namespace weft
