//! `weact diagnose mismatch`.

use std::process::ExitCode;

use serde_json::json;
use weact::{diagnose::mismatch, eval::report::Format};

use super::{Args, Common, need_fusions, open, report, write};

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    need_fusions(args)?;
    let opened = open(args, common)?;
    let positions = &opened.run.mismatch;
    let measured = mismatch::measure(&opened.backbone, &opened.subjects, positions, &mut |what| common.say.note(what))?;
    for (capability, ids) in measured.left_out.iter().filter(|(_, ids)| !ids.is_empty()) {
        let n_prefix = positions.prefix_tokens;
        common.say.warn(&format!("{capability}: {} records have no eligible position in {n_prefix} tokens: {ids:?}", ids.len()));
    }
    write(&opened, "mismatch.jsonl", &measured.records)?;
    let averages = mismatch::averages(&measured.records, positions.per_record, opened.run.bootstrap.resampling());
    let (tables, figure) = mismatch::report(&averages);
    let text = format!("{}\n{}", tables[0].title, tables[0].render(Format::Terminal));
    let page = report(&opened, "mismatch", "Local mismatch", tables, figure)?;
    let rows: Vec<_> = averages
        .iter()
        .map(|(fusion, capability, of_all)| json!({"fusion": fusion, "capability": capability, "mismatch": of_all}))
        .collect();
    let json = json!({"mismatches": rows, "left_out": measured.left_out, "page": page});
    common.say.result(&format!("{text}{}", page.display()), &json)?;
    Ok(ExitCode::SUCCESS)
}
