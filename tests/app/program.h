// Runs the built program as a user does: arguments, pipes or a terminal, signals.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace weft::program {

using Arguments = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;  // an empty value unsets

// Exits as a shell shows it: 128 + signal for a death by signal.
inline int shell_status(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// In the child, after its descriptors are set.
[[noreturn]] inline void become_weft(const Arguments& arguments, const Environment& environment) {
  for (const auto& [name, value] : environment)
    value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv = {const_cast<char*>("weft")};
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  execv(WEFT_BINARY_DIR "/weft", argv.data());
  _exit(127);
}

struct Ran {
  int status = -1;
  std::string out, err;
  double seconds_after_close = 0;  // from closing the pipe (read_at_most) to the program's end
};

struct Piped {
  std::string input = {};
  Environment environment = {};
  bool close_stdin = false;
  const char* stdout_path = nullptr;  // instead of a pipe
  size_t read_at_most = SIZE_MAX;     // then the pipe is closed, as head does
  double signal_after = 0;            // seconds after the first byte of output: SIGINT
  double timeout = 60;
};

inline Ran run(const Arguments& arguments, const Piped& how = {}) {
  int in[2], out[2], err[2];
  if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC))
    throw std::runtime_error("pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    signal(SIGPIPE, SIG_DFL);
    dup2(in[0], 0);
    if (how.close_stdin) close(0);
    dup2(how.stdout_path ? open(how.stdout_path, O_WRONLY) : out[1], 1);
    dup2(err[1], 2);
    become_weft(arguments, how.environment);
  }
  close(in[0]), close(out[1]), close(err[1]);
  signal(SIGPIPE, SIG_IGN);
  [[maybe_unused]] const ssize_t n =
      write(in[1], how.input.data(), how.input.size());  // below a pipe's 64 KiB
  close(in[1]);
  Ran ran;
  const double deadline = now() + how.timeout;
  double interrupt_at = 0, closed_at = 0;
  bool out_open = true, err_open = true;
  while (out_open || err_open) {
    pollfd fds[2] = {{out_open ? out[0] : -1, POLLIN, 0}, {err_open ? err[0] : -1, POLLIN, 0}};
    poll(fds, 2, 20);
    if (interrupt_at > 0 && now() > interrupt_at) {
      kill(pid, SIGINT);
      interrupt_at = 0;
    }
    if (now() > deadline) {
      kill(pid, SIGKILL);
      ran.err += "[killed by the test: too slow]";
      break;
    }
    char bytes[4096];
    if (fds[0].revents) {
      const ssize_t got = read(out[0], bytes, std::min(sizeof bytes, how.read_at_most - ran.out.size()));
      if (got > 0 && ran.out.empty() && how.signal_after > 0) interrupt_at = now() + how.signal_after;
      if (got > 0) ran.out.append(bytes, static_cast<size_t>(got));
      if (got <= 0 || ran.out.size() >= how.read_at_most) {
        out_open = false;
        close(out[0]);
        closed_at = now();
      }
    }
    if (fds[1].revents) {
      const ssize_t got = read(err[0], bytes, sizeof bytes);
      if (got > 0)
        ran.err.append(bytes, static_cast<size_t>(got));
      else
        err_open = false;
    }
  }
  if (out_open) close(out[0]);
  close(err[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  ran.seconds_after_close = closed_at > 0 ? now() - closed_at : 0;
  ran.status = shell_status(status);
  return ran;
}

// A person at a terminal.
class Terminal {
 public:
  Terminal(const Arguments& arguments, const Environment& environment) {
    // This side keeps the terminal open, so that its settings can be read when the program is gone.
    if (openpty(&master_, &slave_, nullptr, nullptr, nullptr)) throw std::runtime_error("openpty");
    before_ = settings();
    pid_ = fork();
    if (pid_ == 0) {
      close(master_);
      login_tty(slave_);
      become_weft(arguments, environment);
    }
  }
  ~Terminal() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(master_), close(slave_);
  }

  void send(const std::string& bytes) {
    [[maybe_unused]] const ssize_t n = write(master_, bytes.data(), bytes.size());
  }
  void signal(int number) { kill(pid_, number); }
  // Waits until what was shown since the last expect() holds `text`.
  bool expect(const std::string& text, double seconds = 20) {
    const double deadline = now() + seconds;
    for (;;) {
      if (const size_t at = shown_.find(text, seen_); at != shown_.npos) {
        seen_ = at + text.size();
        return true;
      }
      if (now() > deadline || !take(50)) return false;
    }
  }
  // Waits for so many bytes beyond what was expected before.
  bool expect_more(size_t bytes, double seconds = 20) {
    const double deadline = now() + seconds;
    while (shown_.size() < seen_ + bytes)
      if (now() > deadline || !take(50)) return false;
    return true;
  }
  // Waits for the end; -1: it did not come.
  int status(double seconds = 20) {
    const double deadline = now() + seconds;
    while (now() < deadline) {
      take(20);
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        while (take(20)) {
        }
        pid_ = -1;
        return shell_status(status);
      }
    }
    return -1;
  }
  const std::string& shown() const { return shown_; }
  bool settings_restored() const {
    const termios now = settings();
    return now.c_iflag == before_.c_iflag && now.c_oflag == before_.c_oflag &&
           now.c_cflag == before_.c_cflag && now.c_lflag == before_.c_lflag &&
           std::memcmp(now.c_cc, before_.c_cc, sizeof now.c_cc) == 0;
  }

 private:
  // False: nothing came within the time.
  bool take(int milliseconds) {
    pollfd fd{master_, POLLIN, 0};
    if (poll(&fd, 1, milliseconds) <= 0) return pid_ > 0 && milliseconds > 20;
    char bytes[4096];
    const ssize_t n = read(master_, bytes, sizeof bytes);
    if (n > 0) shown_.append(bytes, static_cast<size_t>(n));
    return n > 0;
  }
  termios settings() const {
    termios t = {};
    tcgetattr(slave_, &t);
    return t;
  }

  int master_ = -1, slave_ = -1;
  pid_t pid_ = -1;
  termios before_ = {};
  std::string shown_;
  size_t seen_ = 0;
};

inline size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + what.size())) ++n;
  return n;
}

// A folder that goes with the object.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "weft-test-XXXXXX";
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}
inline std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// A small model of random weights with one of the test tokenizers beside it.
inline std::string make_model(const Folder& folder, const std::string& family = "kimi_linear",
                              const std::string& tokenizer = "kimi_small", const Arguments& more = {}) {
  const std::string path = folder / family;
  Arguments arguments = {"synth", family,        "-o",
                         path,    "--tokenizer", WEFT_SOURCE_DIR "/tests/golden/tokenizers/" + tokenizer};
  std::istringstream sizes(
      "--vocab 8192 --hidden 64 --layers 4 --heads 2 --kv-lora 32 --nope 16 --v-dim 16 --intermediate 64 "
      "--experts 16 --top-k 2 --expert-width 32");
  for (std::string word; sizes >> word;) arguments.push_back(word);
  if (family != "deepseek_v32") arguments.insert(arguments.end(), {"--kda-head-dim", "16"});
  if (family != "glm5_next") arguments.insert(arguments.end(), {"--rope", "8"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Ran made = run(arguments);
  if (made.status != 0) throw std::runtime_error("weft synth: " + made.err);
  return path;
}

}  // namespace weft::program
