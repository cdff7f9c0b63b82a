#include "app/questions.h"

#include <algorithm>

#include "app/answer.h"
#include "base/check.h"

namespace weft {

std::string Questions::message(const std::string& document, const std::string& question) {
  return document + "\n\n" + question;
}

Questions::Questions(Engine& engine, const ChatRequest& base, const std::string& document,
                     const std::vector<std::string>& questions, int max_tokens)
    : engine_(engine), chat_(base), answers_(questions.size()), max_tokens_(max_tokens) {
  for (const std::string& question : questions) {
    ChatRequest chat = base;
    chat.messages.push(chat_message("user", message(document, question)));
    prompts_.push_back(engine.encode(engine.chat().encode(chat)));
  }
  if (prompts_.size() < 2) return;
  size_t same = prompts_[0].size() - 1;
  for (const auto& prompt : prompts_) {
    same = std::min(same, prompt.size() - 1);
    same = std::mismatch(prompt.begin(), prompt.begin() + same, prompts_[0].begin()).first - prompt.begin();
  }
  shared_ = static_cast<int>(same) / kPageTokens * kPageTokens;
}

void Questions::submit(const Hooks& hooks) {
  WEFT_CHECK(!done() && !running_);
  hooks_ = hooks;
  reading_shared_ = shared_ > 0 && !shared_read_;
  Request request;
  request.prompt = prompts_[next_];
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens_;
  request.session = &session_;
  request.hide_special = false;  // the parser reads them
  request.on_prefill = hooks_.on_prefill;
  if (reading_shared_) {
    request.prompt.resize(shared_);
    request.max_tokens = 1;  // the engine saves the state where a prompt ends
  } else {
    parser_ = engine_.chat().parser(chat_);
    request.on_token = [this](int32_t, const std::string& piece) {
      for (const ChatEvent& event : parser_->push(piece)) take_event(event);
    };
  }
  id_ = engine_.submit(std::move(request));
  running_ = true;
}

void Questions::take_event(const ChatEvent& event) {
  Answer& answer = answers_[next_];
  if (event.kind == ChatEvent::Kind::reasoning) answer.reasoning += event.text;
  if (event.kind == ChatEvent::Kind::reasoning_was_content) answer.reasoning.clear();
  if (event.kind == ChatEvent::Kind::content) answer.content += event.text;
  if (hooks_.on_event) hooks_.on_event(event);
}

int Questions::poll() {
  if (!running_) return -1;
  const std::optional<Result> result = engine_.take(id_);
  if (!result) return -1;
  running_ = false;
  if (reading_shared_) {
    if (result->finish == Finish::error) throw Error(result->error);
    shared_read_ = result->finish != Finish::cancelled;
    shared_seconds_ = result->stats.prefill_seconds;
    return -1;
  }
  for (const ChatEvent& event : parser_->finish()) take_event(event);
  Answer& answer = answers_[next_];
  answer.stats = result->stats, answer.finish = result->finish, answer.error = result->error;
  return static_cast<int>(next_++);
}

}  // namespace weft
