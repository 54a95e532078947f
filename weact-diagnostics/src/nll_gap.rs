//! Target-text fit (Appendix E.3): how much worse a policy predicts the recorded text of a capability than its own specialist.

use serde::Serialize;
use weact_core::stats::{Resampling, mean_bootstrap};

use crate::{Error, Result, teacher_forced::Scored};

/// The paired gaps of one policy over one capability's records (Fig. 14).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NllGap {
    /// `dL(x)` of each record, in the records' order, in nats per token.
    pub per_record: Vec<f64>,
    /// Mean over records, each weighing the same; none without records.
    pub mean: Option<f64>,
    /// The bootstrap's central 95 % of the mean, over records; unknown below two.
    pub interval95: Option<(f64, f64)>,
    /// Median over records: of an even number, the middle of the two in the middle; none without records.
    pub median: Option<f64>,
}

/// The NLL gap of the policy `fused` against the specialist `own` (Appendix E.3):
///
/// `dL_m,k(x) = L_m(x) - L_k(x)`, where `L(x)` is the mean NLL of the record's supervised tokens.
///
/// Positive where the fusion fits the text worse. Both lists hold the same records in the same order.
///
/// # Errors
/// If ids or token counts differ, or a record has no supervised token or an NLL that is not finite.
pub fn nll_gap(fused: &[Scored], own: &[Scored], resampling: Resampling) -> Result<NllGap> {
    Ok(NllGap::of(gaps(fused, own)?, resampling))
}

/// `dL(x)` of each record, in nats per token.
///
/// # Errors
/// As [`nll_gap`].
pub fn gaps(fused: &[Scored], own: &[Scored]) -> Result<Vec<f64>> {
    if fused.len() != own.len() {
        return Err(Error::Unpaired(format!("{} records of the fusion, {} of the specialist", fused.len(), own.len())));
    }
    fused.iter().zip(own).map(|(m, k)| gap(m, k)).collect()
}

impl NllGap {
    /// The summary of the records' gaps.
    pub fn of(per_record: Vec<f64>, resampling: Resampling) -> Self {
        let n = per_record.len();
        let mut sorted = per_record.clone();
        sorted.sort_by(f64::total_cmp);
        let mean = (n > 0).then(|| per_record.iter().sum::<f64>() / n as f64);
        let median = (n > 0).then(|| (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0);
        let interval95 = mean_bootstrap(&per_record, resampling).map(|law| law.interval(0.95));
        Self { per_record, mean, interval95, median }
    }
}

fn gap(m: &Scored, k: &Scored) -> Result<f64> {
    let refuse = |why: String| Err(Error::Unpaired(format!("record {:?}: {why}", m.id)));
    let n_tokens = m.nll_nats.len();
    if m.id != k.id {
        return refuse(format!("the specialist has {:?} in its place", k.id));
    }
    if n_tokens != k.nll_nats.len() {
        return refuse(format!("{n_tokens} supervised tokens of the fusion, {} of the specialist", k.nll_nats.len()));
    }
    if n_tokens == 0 {
        return refuse("it has no supervised token, leave it out of both lists".to_owned());
    }
    let gap = (m.nll_nats.iter().sum::<f64>() - k.nll_nats.iter().sum::<f64>()) / n_tokens as f64;
    if !gap.is_finite() {
        return refuse("an NLL is not finite".to_owned());
    }
    Ok(gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESAMPLING: Resampling = Resampling { n: 1000, seed: 0 };

    fn score(id: &str, nll_nats: &[f64]) -> Scored {
        Scored { id: id.to_owned(), nll_nats: nll_nats.to_vec(), top1: vec![false; nll_nats.len()] }
    }

    #[test]
    fn records_weigh_the_same_whatever_their_length() {
        let own = [score("a", &[0.5, 1.5]), score("b", &[1.0]), score("c", &[0.25, 0.25, 0.25, 0.25]), score("d", &[2.0])];
        let fused = [score("a", &[1.0, 2.0]), score("b", &[6.0]), score("c", &[0.25, 0.5, 0.25, 1.0]), score("d", &[1.5])];
        let gap = nll_gap(&fused, &own, RESAMPLING).expect("paired");
        assert_eq!(gap.per_record, [0.5, 5.0, 0.25, -0.5]);
        assert_eq!((gap.mean, gap.median), (Some(5.25 / 4.0), Some(0.375)));
        let (low, high) = gap.interval95.expect("four records");
        assert!((-0.5..0.5).contains(&low) && (2.0..=5.0).contains(&high), "{low} {high}");
        assert_eq!(nll_gap(&fused[..1], &own[..1], RESAMPLING).expect("paired").interval95, None);
        let odd = nll_gap(&fused[..3], &own[..3], RESAMPLING).expect("paired");
        assert_eq!((odd.mean, odd.median), (Some(5.75 / 3.0), Some(0.5)));
    }

    #[test]
    fn no_records_have_no_mean() {
        assert_eq!(
            nll_gap(&[], &[], RESAMPLING).expect("paired"),
            NllGap { per_record: vec![], mean: None, interval95: None, median: None }
        );
    }

    #[test]
    fn scores_of_other_tokens_are_refused() {
        let own = [score("a", &[1.0, 2.0]), score("b", &[1.0])];
        let cases: [(&[Scored], &str); 5] = [
            (&own[..1], "1 records of the fusion, 2 of the specialist"),
            (&[own[0].clone(), score("c", &[1.0])], "record \"c\": the specialist has \"b\" in its place"),
            (&[score("a", &[1.0]), own[1].clone()], "record \"a\": 1 supervised tokens of the fusion, 2 of the specialist"),
            (&[score("a", &[1.0, f64::INFINITY]), own[1].clone()], "record \"a\": an NLL is not finite"),
            (&[score("a", &[1.0, f64::NAN]), own[1].clone()], "record \"a\": an NLL is not finite"),
        ];
        for (fused, why) in cases {
            let error = nll_gap(fused, &own, RESAMPLING).expect_err(why);
            assert_eq!(error.to_string(), format!("scores can't be paired: {why}"));
        }
        let empty = [score("a", &[])];
        assert!(nll_gap(&empty, &empty, RESAMPLING).is_err());
    }
}
