//! `weact render`

use std::{path::PathBuf, process::ExitCode};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use weact::core::chat::{Chat, ToolProtocol};

use super::{Common, lines};

/// Renders conversations by the checkpoint's template and encodes them, exactly as transformers does
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A folder with tokenizer and chat template
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// One `{"messages","tools","add_generation_prompt","enable_thinking"}` a line
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// One `{"text","ids"}` a line, with the input's `id` where it has one
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The ids of runs and training: text of users and tools makes no control token
    #[arg(long)]
    safe: bool,
}

#[derive(Deserialize)]
struct Conversation {
    id: Option<Value>,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    enable_thinking: Option<bool>,
}

#[derive(Serialize)]
struct Rendered {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    text: String,
    ids: Vec<u32>,
}

/// Writes one line per line.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let chat = Chat::open(&args.model, ToolProtocol::Template)?;
    let mut rendered = Vec::new();
    for (line, c) in lines::read::<Conversation>(&args.input)? {
        let tools = c.tools.unwrap_or_default();
        let (text, ids) = chat
            .render_official(&c.messages, &tools, c.add_generation_prompt.unwrap_or(false), c.enable_thinking, args.safe)
            .map_err(|e| lines::wrong(&args.input, line, e.to_string()))?;
        rendered.push(Rendered { id: c.id, text, ids });
    }
    lines::write(&args.out, &rendered)?;
    let tokens: usize = rendered.iter().map(|r| r.ids.len()).sum();
    let text = format!("{} conversations, {tokens} tokens -> {}", rendered.len(), args.out.display());
    common.say.summary(&text, &json!({"rows": rendered.len(), "tokens": tokens, "out": args.out}))?;
    Ok(ExitCode::SUCCESS)
}
