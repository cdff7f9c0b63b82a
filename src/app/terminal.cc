#include "app/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace weft {
namespace {

// Writes all of it; returns errno, 0 when everything is written.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (n < 0 && errno == EAGAIN) {  // someone left the pipe non-blocking
      pollfd waits{fd, POLLOUT, 0};
      ::poll(&waits, 1, -1);
    } else if (n < 0 && errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

// Read by signal handlers: plain data, set before the handlers are.
volatile std::sig_atomic_t g_presses = 0;
volatile std::sig_atomic_t g_presses_to_quit = 1;
volatile std::sig_atomic_t g_mode_on = 0;
int g_mode_fd = -1;
termios g_saved, g_raw;

// Async-signal-safe.
void put_terminal_back() {
  if (g_mode_on) tcsetattr(g_mode_fd, TCSADRAIN, &g_saved);
}

// For signals that come while the line editor waits: its bracketed paste ends as well.
void leave_terminal() {
  constexpr char kPasteOff[] = "\x1b[?2004l";
  if (g_mode_on && ::write(g_mode_fd, kPasteOff, sizeof kPasteOff - 1) < 0) g_mode_on = 0;  // hung up
  put_terminal_back();
}

void on_interrupt(int) {
  const int saved_errno = errno;
  g_presses = g_presses + 1;
  if (g_presses >= g_presses_to_quit) {
    leave_terminal();
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, "\n", 1);
    _exit(130);
  }
  errno = saved_errno;
}

void on_end(int signal) {
  leave_terminal();
  g_mode_on = 0;
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void on_stop(int) {
  const int saved_errno = errno;
  leave_terminal();
  ::raise(SIGSTOP);
  if (g_mode_on) tcsetattr(g_mode_fd, TCSADRAIN, &g_raw);
  errno = saved_errno;
}

// Without SA_RESTART: a read at the prompt must come back.
void handle(int signal, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

constexpr int kEndSignals[] = {SIGTERM, SIGHUP, SIGQUIT, SIGABRT};

}  // namespace

TerminalStyle terminal_style(int fd) {
  TerminalStyle style;
  style.terminal = ::isatty(fd) == 1;
  const char* term = std::getenv("TERM");
  style.escapes = style.terminal && term != nullptr && *term != '\0' && std::strcmp(term, "dumb") != 0;
  const char* no_color = std::getenv("NO_COLOR");
  style.color = style.escapes && (no_color == nullptr || *no_color == '\0');
  return style;
}

int terminal_columns(int fd) {
  winsize size = {};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

int display_width(std::string_view text) {
  // wcwidth() would need a UTF-8 locale, which containers often lack.
  int width = 0;
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const int length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    uint32_t code = length == 1 ? lead : lead & (0x3f >> (length - 1));
    for (int k = 1; k < length && i + k < text.size(); ++k) code = code << 6 | (text[i + k] & 0x3f);
    i += length;
    const auto in = [code](uint32_t low, uint32_t high) { return code >= low && code <= high; };
    if (in(0x300, 0x36f) || in(0x200b, 0x200f) || in(0xfe00, 0xfe0f)) continue;
    const bool wide = in(0x1100, 0x115f) || in(0x2e80, 0xa4cf) || in(0xac00, 0xd7a3) || in(0xf900, 0xfaff) ||
                      in(0xfe30, 0xfe6f) || in(0xff00, 0xff60) || in(0xffe0, 0xffe6) ||
                      in(0x1f300, 0x1faff) || in(0x20000, 0x3fffd);
    width += wide ? 2 : 1;
  }
  return width;
}

void Output::write(std::string_view bytes) {
  if (bytes.empty()) return;
  if (terminal_) {
    // What a model writes must not act on the terminal (titles, key bindings, the clipboard).
    std::string harmless(bytes);
    for (char& c : harmless)
      if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) c = '?';
    style(harmless);
  } else {
    style(bytes);
  }
  line_open_ = bytes.back() != '\n';
}

void Output::style(std::string_view escape) {
  if (const int error = write_all(STDOUT_FILENO, escape))
    fail("cannot write to stdout: {}", std::strerror(error));
}

bool Output::reader_gone() const {
  pollfd pipe{STDOUT_FILENO, 0, 0};
  return ::poll(&pipe, 1, 0) == 1 && (pipe.revents & (POLLERR | POLLHUP)) != 0;
}

void Notes::line(const std::string& text) const {
  if (!quiet_) write_all(STDERR_FILENO, text + "\n");
}

void Notes::warning(const std::string& text) const {
  write_all(STDERR_FILENO, "weft: warning: " + text + "\n");
}

Progress::Progress(const Notes& notes, std::string label)
    : notes_(&notes), label_(std::move(label)), style_(terminal_style(STDERR_FILENO)) {}

double Progress::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void Progress::update(double fraction, const std::string& detail) {
  using std::chrono::milliseconds;
  if (notes_->quiet()) return;
  const Clock::time_point now = Clock::now();
  // A bar may move ten times a second; a log wants a line every few seconds.
  const milliseconds pause = style_.escapes ? milliseconds(drawn_ ? 100 : 300) : milliseconds(5000);
  if (now - shown_ < pause) return;
  shown_ = now;
  fraction = std::clamp(fraction, 0.0, 1.0);
  const double left = fraction > 0.02 ? seconds() * (1 - fraction) / fraction : 0;
  std::string text = fmt::format("{:3.0f} %  {}", 100 * fraction, detail);
  if (left >= 1) text += fmt::format(", {:.0f} s left", left);
  if (!style_.escapes) {
    notes_->line(label_ + " " + text);
    return;
  }
  constexpr int kBar = 24;
  const int full = static_cast<int>(fraction * kBar);
  std::string line =
      fmt::format("{} [{}{}] {}", label_, std::string(full, '#'), std::string(kBar - full, '.'), text);
  line.resize(std::min(line.size(), static_cast<size_t>(terminal_columns(STDERR_FILENO) - 1)));
  write_all(STDERR_FILENO, "\r" + line + "\x1b[K");
  drawn_ = true;
}

void Progress::clear() {
  if (drawn_) write_all(STDERR_FILENO, "\r\x1b[K");
  drawn_ = false;
}

void catch_interrupts(int presses) {
  g_presses = 0;
  g_presses_to_quit = presses;
  handle(SIGINT, on_interrupt);
}

bool interrupted() {
  return g_presses > 0;
}
void forget_interrupts() {
  g_presses = 0;
}

TerminalMode::TerminalMode(int fd) {
  WEFT_CHECK(!g_mode_on, "two terminal modes at once");
  if (tcgetattr(fd, &g_saved) != 0) fail("cannot read the terminal's settings: {}", std::strerror(errno));
  g_mode_fd = fd;
  g_raw = g_saved;
  g_raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  g_raw.c_cc[VMIN] = 1;
  g_raw.c_cc[VTIME] = 0;
  g_mode_on = 1;
  for (const int signal : kEndSignals) handle(signal, on_end);
  handle(SIGTSTP, on_stop);
  // Drain, not flush: what was typed while the model loaded is the first message.
  tcsetattr(fd, TCSADRAIN, &g_raw);
}

TerminalMode::~TerminalMode() {
  put_terminal_back();
  g_mode_on = 0;
  for (const int signal : kEndSignals) ::signal(signal, SIG_DFL);
  ::signal(SIGTSTP, SIG_DFL);
}

}  // namespace weft
