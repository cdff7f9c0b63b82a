// Questions about one document, which is read once: each question goes back to the state behind it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "text/chat.h"

namespace weft {

struct Answer {
  std::string reasoning, content;
  RequestStats stats;
  Finish finish = Finish::none;
  std::string error;
};

// The requests of a document, in order; hand each to the engine when the one before is done.
//
// The beginning that all prompts share, up to a multiple of 64 tokens, is read first and its state saved:
// prompts cut there give the same bits as whole ones (engine/scheduler.h), so an answer does not depend on
// its neighbours. The engine needs two checkpoints for each Questions in use at once.
class Questions {
 public:
  // error: what the chat format or the tokenizer says about a message.
  Questions(Engine& engine, const ChatRequest& base, const std::string& document,
            const std::vector<std::string>& questions, int max_tokens);
  // How `document` and `question` become one message.
  static std::string message(const std::string& document, const std::string& question);

  struct Hooks {
    std::function<void(int done, int total)> on_prefill;
    std::function<void(const ChatEvent&)> on_event;  // of the answer under way
  };
  bool done() const { return next_ == prompts_.size() && !running_; }
  void submit(const Hooks& hooks = {});  // the next request; needs !done() and none under way
  // The index of the question that has just been answered, -1 for none (or for the shared beginning).
  int poll();
  bool running() const { return running_; }
  size_t next() const { return next_; }  // the question under way, or to be asked
  void cancel() { engine_.cancel(id_); }

  const Answer& answer(int question) const { return answers_[question]; }
  int prompt_tokens(int question) const { return static_cast<int>(prompts_[question].size()); }
  int shared_tokens() const { return shared_; }
  double shared_seconds() const { return shared_seconds_; }  // reading them
  const Session& session() const { return session_; }

 private:
  void take_event(const ChatEvent& event);

  Engine& engine_;
  ChatRequest chat_;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<Answer> answers_;
  int max_tokens_, shared_ = 0;
  double shared_seconds_ = 0;
  bool shared_read_ = false, running_ = false, reading_shared_ = false;
  size_t next_ = 0;
  Engine::Id id_ = 0;
  Session session_;
  std::unique_ptr<ChatParser> parser_;
  Hooks hooks_;
};

}  // namespace weft
