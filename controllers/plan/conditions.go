package plan

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sales "flashsale.dev/operator/api/v1alpha1"
)

// conditions says what the decision means, a function per condition. A condition that has no meaning now is absent;
// Reconciling and Stalled are there only while True.
func (s sale) conditions(d Decision) []metav1.Condition {
	var all []metav1.Condition
	for _, f := range []func(Decision) *metav1.Condition{
		s.ready, s.reconciling, s.stalled, s.databaseReachable, s.inventoryLoaded, s.reserversAvailable, s.sweeperHealthy, s.selling,
	} {
		if c := f(d); c != nil {
			all = append(all, *c)
		}
	}
	return all
}

func condition(kind string, status bool, reason, message string) *metav1.Condition {
	c := &metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message}
	if status {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// trouble is what keeps the sale from being ready, if anything: who must act, and why.
func (s sale) trouble(d Decision) *Fault {
	switch {
	case d.Phase == sales.PhaseClosed:
		return nil
	case s.seen.Fault != nil:
		return s.seen.Fault
	case s.seen.Audit != nil && !s.seen.Audit.OK:
		return &Fault{sales.ReasonAuditFailed, d.Message, true}
	case s.seen.Beside:
		return &Fault{sales.ReasonOperatorNamespace, d.Message, true}
	case d.Phase == sales.PhaseFailed:
		return &Fault{sales.ReasonTablesLost, d.Message, true}
	case s.seen.ChildFault != nil && d.Run:
		return s.seen.ChildFault
	case d.Phase == sales.PhasePending:
		return &Fault{sales.ReasonPending, d.Message, false}
	case d.Phase == sales.PhaseLoading:
		return &Fault{sales.ReasonLoading, d.Message, false}
	// Before the start every pod is wanted ready; later one that answers is enough.
	case d.Run && (s.seen.Reservers.Ready == 0 || d.Phase == sales.PhaseWarming && s.seen.Reservers.Ready < s.want()):
		return s.unavailable()
	case s.tooMany():
		return s.unitsInUse()
	}
	return nil
}

// unavailable says that pods are not ready, and why where the cluster tells.
func (s sale) unavailable() *Fault {
	message := fmt.Sprintf("%d of %d reservation pods are ready", s.seen.Reservers.Ready, s.want())
	if f := s.seen.PodFault; f != nil {
		return &Fault{f.Reason, message + ": " + f.Message, f.Person}
	}
	return &Fault{sales.ReasonUnavailable, message, false}
}

// unitsInUse says why there are more units than the spec wants. Holds may lapse; what is sold stays sold.
func (s sale) unitsInUse() *Fault {
	sale := s.seen.Sale
	f := &Fault{Reason: sales.ReasonUnitsInUse, Message: fmt.Sprintf("spec.units is %d, but %d held and %d sold stay: %d units",
		s.spec.Units, sale.Held, sale.Sold, sale.Units)}
	if sale.Sold > int64(s.spec.Units) {
		f.Person = true
		f.Message += fmt.Sprintf("; set units to %d or more", sale.Sold)
	}
	return f
}

func (s sale) ready(d Decision) *metav1.Condition {
	if t := s.trouble(d); t != nil {
		return condition(sales.ConditionReady, false, t.Reason, t.Message)
	}
	return condition(sales.ConditionReady, true, s.phaseReason(d), d.Message)
}

// phaseReason names the phase, and of a closed sale how it ended.
func (s sale) phaseReason(d Decision) string {
	if d.Phase != sales.PhaseClosed {
		return string(d.Phase)
	}
	if before := meta.FindStatusCondition(s.seen.Previous.Conditions, sales.ConditionReady); before != nil && s.seen.Previous.Phase == sales.PhaseClosed {
		return before.Reason
	}
	if s.seen.Sale == nil || s.seen.Sale.ClosedAt.IsZero() {
		return sales.ReasonMissed
	}
	return s.closedReason()
}

func (s sale) reconciling(d Decision) *metav1.Condition {
	if t := s.trouble(d); t != nil && !t.Person {
		return condition(sales.ConditionReconciling, true, t.Reason, t.Message)
	}
	return nil
}

func (s sale) stalled(d Decision) *metav1.Condition {
	if t := s.trouble(d); t != nil && t.Person {
		return condition(sales.ConditionStalled, true, t.Reason, t.Message)
	}
	return nil
}

func (s sale) databaseReachable(d Decision) *metav1.Condition {
	if d.Phase == sales.PhaseClosed {
		return nil // nobody asks the database about a sale that is over
	}
	if s.seen.Beside {
		return nil
	}
	if f := s.seen.Fault; f != nil {
		return condition(sales.ConditionDatabaseReachable, false, f.Reason, f.Message)
	}
	if w := s.seen.Warning; w != nil {
		return condition(sales.ConditionDatabaseReachable, true, w.Reason, w.Message)
	}
	return condition(sales.ConditionDatabaseReachable, true, sales.ReasonReachable, "the database answers, locks rows and syncs commits to disk")
}

func (s sale) inventoryLoaded(d Decision) *metav1.Condition {
	if s.seen.Sale == nil {
		if before := meta.FindStatusCondition(s.seen.Previous.Conditions, sales.ConditionInventoryLoaded); before != nil && d.Phase != sales.PhaseFailed {
			return condition(before.Type, before.Status == metav1.ConditionTrue, before.Reason, before.Message)
		}
		return condition(sales.ConditionInventoryLoaded, false, s.phaseReason(d), "no unit is loaded")
	}
	message := fmt.Sprintf("%d of %d units loaded", s.seen.Sale.Loaded, s.seen.Sale.Units)
	switch {
	case s.tooMany():
		f := s.unitsInUse()
		return condition(sales.ConditionInventoryLoaded, false, f.Reason, f.Message)
	case s.seen.Sale.Loaded < s.seen.Sale.Units:
		return condition(sales.ConditionInventoryLoaded, false, sales.ReasonLoading, message)
	}
	return condition(sales.ConditionInventoryLoaded, true, sales.ReasonLoaded, message)
}

func (s sale) reserversAvailable(d Decision) *metav1.Condition {
	if !d.Run {
		return nil
	}
	if f := s.seen.ChildFault; f != nil {
		return condition(sales.ConditionReserversAvailable, false, f.Reason, f.Message)
	}
	ready, want := s.seen.Reservers.Ready, s.want()
	if ready < want {
		f := s.unavailable()
		return condition(sales.ConditionReserversAvailable, false, f.Reason, f.Message)
	}
	return condition(sales.ConditionReserversAvailable, true, sales.ReasonAvailable, fmt.Sprintf("%d of %d reservation pods are ready", ready, want))
}

func (s sale) sweeperHealthy(d Decision) *metav1.Condition {
	if !d.Run {
		return nil
	}
	if s.seen.Sweeper.Ready == 0 {
		return condition(sales.ConditionSweeperHealthy, false, sales.ReasonUnavailable, "the sweeper is not ready; reservation pods sweep meanwhile")
	}
	return condition(sales.ConditionSweeperHealthy, true, sales.ReasonAvailable, "the sweeper runs")
}

func (s sale) selling(d Decision) *metav1.Condition {
	return condition(sales.ConditionSelling, d.Phase == sales.PhaseLive && s.seen.Reservers.Ready > 0, s.phaseReason(d), d.Message)
}
