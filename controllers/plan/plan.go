// Package plan decides what a sale needs. It is pure: what was seen goes in, what is to be done comes out; no client, no
// SQL and no clock. docs/lifecycle.md draws it.
package plan

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
)

// Observed is what was seen of a sale in one pass.
type Observed struct {
	Generation  int64
	DeletedAt   time.Time // zero unless the object is being deleted
	ForceDelete bool      // the annotation is set
	Beside      bool      // the object is in the operator's own namespace

	// Previous is the status as last written.
	Previous sales.FlashSaleStatus

	// Fault says why the database cannot be used; nil when it can.
	Fault *Fault
	// Warning says what is wrong with a database that can be used; nil when nothing is.
	Warning *Fault
	// Sale is the database's view; nil when it does not know the sale, or with a Fault.
	Sale *inventory.Snapshot
	// SoldOutAt is when the last unit was sold; zero while any is not.
	SoldOutAt time.Time
	// Undelivered is how many events of a closed sale the webhook has still to be told.
	Undelivered int
	// Audit is the report on a closed sale, and Summary its figures; nil until they were made.
	Audit   *inventory.Report
	Summary *inventory.Summary

	Reservers Pods
	Sweeper   Pods
	// PodFault says why reservation pods that are wanted are not ready, where the cluster tells; nil when it does not.
	PodFault *Fault
	// ChildFault says why children could not be applied in this pass; nil before that, and when they could.
	ChildFault *Fault
}

// Fault is something that keeps the sale from its spec.
type Fault struct {
	Reason  string // CamelCase
	Message string
	// Person says that somebody must act; else the fault may go away by itself.
	Person bool
}

// Pods counts the pods of one Deployment.
type Pods struct{ Desired, Ready int32 }

// Work is one thing to do in the database. After it, look again.
type Work string

// The kinds of work.
const (
	WorkNone     Work = ""
	WorkRegister Work = "register" // write the spec to the sale's row
	WorkDrain    Work = "drain"    // the same, and no new holds ever
	WorkLoad     Work = "load"     // insert missing unit rows
	WorkShrink   Work = "shrink"   // take available units away
	WorkEndHolds Work = "endHolds" // let live holds lapse now
	WorkSweep    Work = "sweep"    // take lapsed holds back, as no sweeper does
	WorkClose    Work = "close"    // close the sale for good
	WorkAudit    Work = "audit"    // prove the invariants
	WorkPurge    Work = "purge"    // delete the sale's rows
)

// Long says that the work may take many passes.
func (w Work) Long() bool { return w == WorkLoad || w == WorkShrink || w == WorkPurge }

// Decision is what a sale needs now.
type Decision struct {
	Phase      sales.Phase
	Conditions []metav1.Condition // without times and generation
	Message    string
	Work       Work
	Run        bool          // pods and sweeper are wanted; else they are to go
	Least      int32         // of reservation pods; an autoscaler may want more
	Want       int32         // reservation pods that there are to be, as far as one knows
	Publish    bool          // the sweeper is wanted, to deliver the last events
	Finish     bool          // the finalizer can go
	Wake       time.Duration // look again after this; zero: only when something changes
}

// The times between two looks.
const (
	wakeLive   = time.Second     // counts in the status are at most 2 s old
	wakeFault  = 5 * time.Second // faults go away without an event
	wakeAtMost = 10 * time.Minute
	// fullFor is how long after the start the autoscaler may not go below the size at the start.
	fullFor = time.Minute
	// sweepGrace is how long after a hold's time a sweeper may take to end it (invariant I4).
	sweepGrace = 2 * time.Second
	// patience is how long the deletion of an object waits for an unreachable database before it goes on without.
	patience = 30 * time.Second
)

// sale is one decision in the making.
type sale struct {
	spec sales.FlashSaleSpec
	seen Observed
	now  time.Time
}

// Decide says what the sale needs. now is the database's time when it is reachable, else the controller's: what must not
// depend on a wrong clock is only decided with the database.
func Decide(spec sales.FlashSaleSpec, seen Observed, now time.Time) Decision {
	s := sale{spec, seen, now}
	for _, rule := range rules {
		if d, hit := rule.decide(s); hit {
			d.Least, d.Want = s.least(), s.want()
			if t := s.trouble(d); t != nil && t != s.seen.Fault { // of the database, the rules say more
				d.Message = t.Message
			}
			d.Conditions = s.conditions(d)
			return d
		}
	}
	panic("unreachable: the last rule always holds")
}

// rules are tried in their order; the first that holds decides.
var rules = []struct {
	name   string
	decide func(sale) (Decision, bool)
}{
	{"a sale that is over stays over, and deletes as asked", over},
	{"no sale runs beside the operator", besideOperator},
	{"a deleted object drains, then goes", deleting},
	{"without the database, pods keep to the clock", databaseFault},
	{"a sale whose end passes before it is loaded is missed", missed},
	{"rows that are gone need a person", tablesLost},
	{"the spec goes to the database first", registering},
	{"a closed sale is audited, and shows its result", closed},
	{"units that are too many are taken away", shrinking},
	{"missing units are loaded", loading},
	{"loaded, it waits without pods until the warm-up", scheduled},
	{"every unit sold, or the window over: it closes when no hold is live", closing},
	{"pods run from the warm-up on", running},
}

func over(s sale) (Decision, bool) {
	if s.seen.Previous.Phase != sales.PhaseClosed {
		return Decision{}, false
	}
	d := Decision{Phase: sales.PhaseClosed, Message: s.seen.Previous.Message}
	d.Publish, d.Wake = s.publish()
	if s.deleted() {
		d.Work, d.Wake, d.Finish = s.leave()
	}
	return d, true
}

func besideOperator(s sale) (Decision, bool) {
	return Decision{Phase: sales.PhaseFailed,
		Message: "this is the operator's own namespace: deleted together with the operator, the sale could not drain. Create it in another namespace"}, s.seen.Beside
}

func deleting(s sale) (Decision, bool) {
	if !s.deleted() {
		return Decision{}, false
	}
	d := Decision{Phase: sales.PhaseDraining}
	switch {
	case s.seen.ForceDelete:
		d.Finish, d.Message = true, "deleted without waiting, as the annotation asks"
	case s.seen.Fault == nil && s.seen.Sale == nil:
		d.Finish, d.Message = true, "nothing was loaded"
	case s.seen.Fault != nil:
		d.Message = "waiting for the database to drain live holds: " + s.seen.Fault.Message
		d.Run, d.Wake = s.seen.Reservers.Desired > 0, wakeFault
		_, _, gone := s.leave()
		waited := s.seen.Fault.Reason == sales.ReasonSecretNotFound || !s.loadedBefore() || s.now.Sub(s.seen.DeletedAt) >= patience
		if d.Finish = gone && waited; d.Finish {
			d.Run = false
		}
		if !gone {
			d.Message = fmt.Sprintf("the sale's rows cannot be deleted: %s. Mend it, set deletionPolicy to Retain, or set the annotation %s to \"true\"",
				s.seen.Fault.Message, sales.AnnotationForceDelete)
		}
	case (!s.seen.Sale.Draining || s.seen.Sale.Generation < s.seen.Generation) && s.seen.Sale.ClosedAt.IsZero():
		d.Work, d.Run, d.Message = WorkDrain, s.seen.Reservers.Desired > 0, "closing the gate"
	case s.seen.Sale.Held > 0:
		d = s.drain("the object is being deleted")
	default:
		d.Message = "drained"
		d.Work, d.Wake, d.Finish = s.leave()
	}
	return d, true
}

// drain waits for the live holds of a sale that grants no more. why says what ended it.
func (s sale) drain(why string) Decision {
	sale := s.seen.Sale
	d := Decision{Phase: sales.PhaseDraining, Run: true, Wake: wakeLive,
		Message: fmt.Sprintf("%s; %d held can be paid, the first until %s", why, sale.Held, sale.NextLapse.Format(time.RFC3339))}
	switch {
	case s.spec.Closing == sales.ClosingRelease && sale.NextLapse.After(s.now):
		d.Work, d.Message = WorkEndHolds, why+"; live holds are released"
	case !sale.NextLapse.IsZero() && s.now.Sub(sale.NextLapse) > sweepGrace: // the pods may be unable to start
		d.Work, d.Message = WorkSweep, why+"; taking lapsed holds back"
	}
	return d
}

// publish says whether a closed sale keeps its sweeper, because events wait for a webhook that does not answer.
func (s sale) publish() (wanted bool, wake time.Duration) {
	if s.spec.Webhook == nil || s.seen.Sweeper.Desired == 0 || s.deleted() || s.seen.Undelivered == 0 && s.seen.Fault == nil {
		return false, 0
	}
	return true, wakeFault
}

// leave says how a drained sale goes: with its rows (Delete) or without.
func (s sale) leave() (work Work, wake time.Duration, finish bool) {
	if s.spec.DeletionPolicy != sales.DeletionDelete || s.seen.ForceDelete {
		return WorkNone, 0, true
	}
	if s.seen.Fault != nil {
		return WorkNone, wakeFault, false
	}
	if s.seen.Sale != nil {
		return WorkPurge, 0, false
	}
	return WorkNone, 0, true
}

func databaseFault(s sale) (Decision, bool) {
	if s.seen.Fault == nil {
		return Decision{}, false
	}
	d := Decision{Phase: s.seen.Previous.Phase, Message: s.seen.Fault.Message, Wake: wakeFault}
	if d.Phase == "" {
		d.Phase = sales.PhasePending
	}
	// Pods are made in time even when only the controller cannot reach the database. The clock may be wrong by minutes:
	// it opens and closes nothing, and pods are taken away only with the database's word.
	before := s.seen.Previous
	loaded := before.Inventory != nil && before.Inventory.Loaded >= int64(s.spec.Units)
	ended := before.ClosedAt != nil || d.Phase == sales.PhaseFailed
	d.Run = s.seen.Reservers.Desired > 0 || loaded && !ended && s.warm()
	return d, true
}

func missed(s sale) (Decision, bool) {
	loaded := s.seen.Sale != nil && (s.seen.Sale.Loaded > 0 || !s.seen.Sale.ClosedAt.IsZero())
	if !s.ended() || loaded || s.loadedBefore() {
		return Decision{}, false
	}
	return Decision{Phase: sales.PhaseClosed, Message: "the end passed before any unit was loaded"}, true
}

func tablesLost(s sale) (Decision, bool) {
	if s.seen.Sale != nil || !s.loadedBefore() {
		return Decision{}, false
	}
	return Decision{Phase: sales.PhaseFailed, Wake: wakeFault, Run: s.seen.Reservers.Desired > 0,
		Message: "the sale's rows are gone from the database: restore them, or delete the object and create it again"}, true
}

func registering(s sale) (Decision, bool) {
	if s.seen.Sale != nil && s.seen.Sale.Generation >= s.seen.Generation {
		return Decision{}, false
	}
	phase := s.seen.Previous.Phase
	if phase == "" {
		phase = sales.PhasePending
	}
	return Decision{Phase: phase, Work: WorkRegister, Run: s.seen.Reservers.Desired > 0, Message: "writing the spec to the database"}, true
}

func closed(s sale) (Decision, bool) {
	sale := s.seen.Sale
	if sale.ClosedAt.IsZero() {
		return Decision{}, false
	}
	d := Decision{Phase: s.seen.Previous.Phase}
	switch {
	case s.seen.Audit == nil || s.seen.Summary == nil:
		d.Work, d.Run, d.Message = WorkAudit, s.seen.Reservers.Desired > 0, "proving the invariants"
	case !s.seen.Audit.OK:
		d.Phase, d.Wake = sales.PhaseFailed, wakeAtMost
		d.Message = fmt.Sprintf("checks of the final audit that failed: %d. Run \"reserver audit --sale-id %s\" to see the rows", len(s.seen.Audit.Failed()), sale.ID)
	default:
		d.Phase = sales.PhaseClosed
		d.Publish, d.Wake = s.publish()
		d.Message = fmt.Sprintf("%s: %d of %d units sold; the audit passed", s.closedReason(), sale.Sold, sale.Units)
	}
	return d, true
}

// shrinking goes as far as available units allow; each hold that lapses lets it go on.
func shrinking(s sale) (Decision, bool) {
	sale := s.seen.Sale
	if !s.tooMany() || sale.Available == 0 && sale.Units <= sale.Loaded {
		return Decision{}, false
	}
	phase := s.seen.Previous.Phase
	if phase == "" || phase == sales.PhasePending {
		phase = sales.PhaseLoading
	}
	return Decision{Phase: phase, Work: WorkShrink, Run: s.seen.Reservers.Desired > 0,
		Message: fmt.Sprintf("%d units, taking away what is more than %d", sale.Loaded, s.spec.Units)}, true
}

// tooMany says that the database has more units for sale than the spec wants.
func (s sale) tooMany() bool {
	return s.seen.Sale != nil && !s.ended() && !s.deleted() && s.seen.Sale.Units > int64(s.spec.Units) && s.seen.Sale.Generation <= s.seen.Generation
}

func loading(s sale) (Decision, bool) {
	sale := s.seen.Sale
	if sale.Loaded >= sale.Units && !sale.LoadedAt.IsZero() || s.ended() { // a loader may have died before it recorded the end
		return Decision{}, false
	}
	d := Decision{Phase: sales.PhaseLoading, Work: WorkLoad, Run: s.warm(),
		Message: fmt.Sprintf("%d of %d units loaded", sale.Loaded, sale.Units)}
	if !sale.LoadedAt.IsZero() && s.warm() { // more units for a sale that runs
		d.Phase = s.runningPhase()
	}
	return d, true
}

func scheduled(s sale) (Decision, bool) {
	if s.warm() {
		return Decision{}, false
	}
	start, _ := s.window()
	return Decision{Phase: sales.PhaseScheduled, Wake: min(s.warmAt().Sub(s.now), wakeAtMost),
		Message: fmt.Sprintf("%d units loaded; opens at %s", s.seen.Sale.Loaded, start.Format(time.RFC3339))}, true
}

func closing(s sale) (Decision, bool) {
	sale := s.seen.Sale
	soldOut := sale.Loaded == sale.Units && sale.Sold == sale.Units
	switch {
	case !soldOut && !s.ended():
		return Decision{}, false
	case sale.Held > 0:
		return s.drain("the window is over"), true
	}
	return Decision{Phase: s.runningPhase(), Work: WorkClose, Run: s.seen.Reservers.Desired > 0, Message: "closing"}, true
}

func running(s sale) (Decision, bool) {
	sale := s.seen.Sale
	d := Decision{Phase: s.runningPhase(), Run: true, Wake: wakeLive}
	start, _ := s.window()
	switch d.Phase {
	case sales.PhaseWarming:
		d.Message = fmt.Sprintf("%d of %d reservation pods ready; opens at %s", s.seen.Reservers.Ready, s.want(), start.Format(time.RFC3339))
		d.Wake = min(max(start.Sub(s.now), time.Millisecond), wakeLive)
	case sales.PhaseSuspended:
		d.Message = fmt.Sprintf("suspended: %d available, %d held can be paid, %d sold", sale.Available, sale.Held, sale.Sold)
	default:
		d.Message = fmt.Sprintf("%d available, %d held, %d sold", sale.Available, sale.Held, sale.Sold)
		if !start.Equal(s.spec.StartTime.Truncate(time.Microsecond)) { // the precision of the database
			d.Message += fmt.Sprintf("; startTime cannot move any more, the sale opened at %s", start.Format(time.RFC3339))
		}
	}
	return d, true
}

// least is the least number of reservation pods now: the full size until a minute after the start, and what the
// autoscaler is bounded by later.
func (s sale) least() int32 {
	scaling := s.spec.Reserver.Autoscaling
	start, _ := s.window()
	if scaling == nil || s.now.Before(start.Add(fullFor)) {
		return s.spec.Reserver.Replicas
	}
	return scaling.MinReplicas
}

// want is how many reservation pods there should be now.
func (s sale) want() int32 {
	if s.spec.Reserver.Autoscaling == nil {
		return s.spec.Reserver.Replicas
	}
	return max(s.least(), s.seen.Reservers.Desired)
}

func (s sale) deleted() bool { return !s.seen.DeletedAt.IsZero() }

func (s sale) loadedBefore() bool {
	return s.seen.Previous.Inventory != nil && s.seen.Previous.Inventory.Loaded > 0
}

// window is what the pods obey: the database's row, which does not follow every edit of the spec; before there is one, the
// spec's own. An end of zero means none.
func (s sale) window() (start, end time.Time) {
	if s.seen.Sale != nil {
		return s.seen.Sale.StartsAt, s.seen.Sale.EndsAt
	}
	if s.spec.EndTime != nil {
		end = s.spec.EndTime.Time
	}
	return s.spec.StartTime.Time, end
}

// ended says that the window is over.
func (s sale) ended() bool {
	_, end := s.window()
	return !end.IsZero() && !s.now.Before(end)
}

func (s sale) warmAt() time.Time {
	start, _ := s.window()
	return start.Add(-s.spec.Reserver.Warmup.Duration)
}

func (s sale) warm() bool { return !s.now.Before(s.warmAt()) }

func (s sale) runningPhase() sales.Phase {
	if s.ended() {
		return sales.PhaseDraining
	}
	if s.spec.Suspend {
		return sales.PhaseSuspended
	}
	if start, _ := s.window(); s.now.Before(start) {
		return sales.PhaseWarming
	}
	return sales.PhaseLive
}

func (s sale) closedReason() string {
	switch {
	case s.seen.Sale.Sold == s.seen.Sale.Units:
		return sales.ReasonSoldOut
	case s.seen.Sale.OpenedAt().IsZero(): // suspended, or still loading, until the end
		return sales.ReasonMissed
	}
	return sales.ReasonEnded
}
