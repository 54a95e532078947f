//! Which result answers which call.

use weact_core::message::{Message, Role, ToolCall};

/// Gives every call an id (`call_<turn>_<i>` where there is none, both from 0, a turn being an assistant message) and every
/// result the id and the name of its call. Results without an id answer the open calls in order.
///
/// Afterwards results stand in the order of their calls: templates render no ids, so another order would pair them wrongly.
pub(super) fn pair(messages: &mut [Message]) -> Result<(), String> {
    let mut turn = 0;
    let mut at = 0;
    while at < messages.len() {
        let n_results = messages[at + 1..].iter().take_while(|m| m.role == Role::Tool).count();
        let (message, results) = messages[at..=at + n_results].split_first_mut().expect("the message at `at`");
        if message.role == Role::Assistant {
            answer(&mut message.tool_calls, results, turn).map_err(|why| format!("message {at}: {why}"))?;
            turn += 1;
        } else if message.role == Role::Tool || !results.is_empty() {
            return Err(format!("message {at}: a tool result that no call stands before"));
        } else if !message.tool_calls.is_empty() {
            return Err(format!("message {at}: calls in a message that is not the assistant's"));
        }
        at += 1 + n_results;
    }
    Ok(())
}

fn answer(calls: &mut [ToolCall], results: &mut [Message], turn: usize) -> Result<(), String> {
    for (i, call) in calls.iter_mut().enumerate() {
        let id = call.id.take().filter(|id| !id.is_empty());
        call.id = Some(id.unwrap_or_else(|| format!("call_{turn}_{i}")));
    }
    let mut open: Vec<&ToolCall> = calls.iter().collect();
    for result in results.iter_mut() {
        let answered = match result.tool_call_id.take().filter(|id| !id.is_empty()) {
            Some(id) => open
                .iter()
                .position(|call| call.id.as_ref() == Some(&id))
                .ok_or_else(|| format!("a result for the id {id:?}, which no open call has"))?,
            None if open.is_empty() => return Err(format!("more results than its {} calls", calls.len())),
            None => 0,
        };
        let call = open.remove(answered);
        result.tool_call_id.clone_from(&call.id);
        result.name.get_or_insert_with(|| call.name.clone());
    }
    if let Some(call) = open.first() {
        return Err(format!("the call of {} has no result", call.name));
    }
    results.sort_by_key(|result| calls.iter().position(|call| call.id == result.tool_call_id));
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    /// Calls and results are `name:id`, without `:id` where there is none; the results' content is their name.
    fn turn(calls: &[&str], results: &[&str]) -> Vec<Message> {
        let parts = |text: &str| match text.split_once(':') {
            Some((name, id)) => (name.to_owned(), Some(id.to_owned())),
            None => (text.to_owned(), None),
        };
        let calls = calls.iter().map(|&call| {
            let (name, id) = parts(call);
            ToolCall { id, ..ToolCall::new(name, Map::new()) }
        });
        let results = results.iter().map(|&result| {
            let (content, tool_call_id) = parts(result);
            Message { tool_call_id, ..Message::text(Role::Tool, content) }
        });
        [Message::calling("", calls.collect())].into_iter().chain(results).collect()
    }

    #[test]
    fn results_find_their_calls() {
        for (calls, results, expected) in [
            (vec!["a", "b"], vec!["1", "2"], [("call_0_0", "1", "a"), ("call_0_1", "2", "b")]),
            (vec!["a:x", "b:y"], vec!["2:y", "1:x"], [("x", "1", "a"), ("y", "2", "b")]),
            (vec!["a:x", "b:y"], vec!["1", "2:y"], [("x", "1", "a"), ("y", "2", "b")]),
        ] {
            let mut messages = turn(&calls, &results);
            pair(&mut messages).expect("a pairing");
            let got = messages[1..]
                .iter()
                .map(|m| (m.tool_call_id.as_deref().expect("an id"), m.content.as_str(), m.name.as_deref().expect("a name")));
            assert_eq!(got.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn an_id_may_repeat_in_another_turn() {
        let mut messages = [turn(&["a:x"], &["1:x"]), turn(&["b:x"], &["2:x"])].concat();
        pair(&mut messages).expect("a pairing");
        assert_eq!(messages[3].name.as_deref(), Some("b"));
    }

    #[test]
    fn what_does_not_pair_is_refused() {
        let user = Message::text(Role::User, "?");
        for (mut messages, why) in [
            (turn(&["a:x"], &["1:z"]), "message 0: a result for the id \"z\""),
            (turn(&["a:x"], &["1:x", "2:x"]), "a result for the id \"x\""),
            (turn(&["a"], &["1", "2"]), "more results than its 1 calls"),
            (turn(&["a", "b"], &["1"]), "the call of b has no result"),
            (vec![user, Message::text(Role::Tool, "1")], "message 0: a tool result"),
            (vec![Message::text(Role::Tool, "1")], "message 0: a tool result"),
            (vec![Message { role: Role::User, ..turn(&["a"], &[]).remove(0) }], "not the assistant's"),
        ] {
            let got = pair(&mut messages).expect_err(why);
            assert!(got.contains(why), "{got}");
        }
    }
}
