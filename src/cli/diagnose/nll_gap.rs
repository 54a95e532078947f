//! `weact diagnose nll-gap`.

use std::process::ExitCode;

use serde_json::json;
use weact::{diagnose::nll_gap, eval::report::Format};

use super::{Args, Common, need_fusions, open, report, write};

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    need_fusions(args)?;
    let opened = open(args, common)?;
    let records = nll_gap::measure(&opened.backbone, &opened.subjects, &mut |what| common.say.note(what))?;
    write(&opened, "nll_gap.jsonl", &records)?;
    let gaps = nll_gap::gaps(&records, opened.run.bootstrap.resampling());
    let (table, figure) = nll_gap::report(&gaps);
    let counts = nll_gap::wholly_right(&records);
    let tables = vec![table, nll_gap::right_table(&counts)];
    let text: String = tables.iter().map(|t| format!("{}\n{}\n", t.title, t.render(Format::Terminal))).collect();
    let page = report(&opened, "nll-gap", "NLL gap", tables, figure)?;
    let rows: Vec<_> = gaps
        .iter()
        .map(|(fusion, capability, gap)| {
            let n = gap.per_record.len();
            json!({"fusion": fusion, "capability": capability, "n_records": n, "mean_nats": gap.mean, "bootstrap95": gap.interval95,
                "median_nats": gap.median})
        })
        .collect();
    common.say.result(&format!("{text}{}", page.display()), &json!({"gaps": rows, "wholly_right": counts, "page": page}))?;
    Ok(ExitCode::SUCCESS)
}
