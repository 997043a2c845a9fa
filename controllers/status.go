package controllers

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
)

// writeStatus writes the status once, and only if it says something new.
func (s *scope) writeStatus(ctx context.Context) error {
	before := s.sale.DeepCopy()
	s.sale.Status = s.status()
	if equality.Semantic.DeepEqual(before.Status, s.sale.Status) {
		return nil
	}
	// With the lock, a controller that was paused and no longer leads cannot overwrite what its successor saw.
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := s.Status().Patch(ctx, s.sale, patch); err != nil {
		return fmt.Errorf("writing the status: %w", err)
	}
	s.announce(ctx, before.Status)
	return nil
}

// status is what the pass found. Counts that could not be read keep their old values.
func (s *scope) status() sales.FlashSaleStatus {
	status := *s.sale.Status.DeepCopy()
	status.ObservedGeneration = s.sale.Generation
	status.Phase, status.Message = s.decision.Phase, s.decision.Message
	wanted := map[string]bool{}
	for _, c := range s.decision.Conditions {
		c.ObservedGeneration = s.sale.Generation
		meta.SetStatusCondition(&status.Conditions, c)
		wanted[c.Type] = true
	}
	for _, c := range s.sale.Status.Conditions {
		if !wanted[c.Type] {
			meta.RemoveStatusCondition(&status.Conditions, c.Type)
		}
	}
	if snap := s.seen.Sale; snap != nil {
		status.Inventory = &sales.InventoryStatus{Loaded: snap.Loaded, Available: snap.Available, Held: snap.Held, Sold: snap.Sold}
		status.OpenedAt = timestamp(snap.OpenedAt(), status.OpenedAt)
		status.ClosedAt = timestamp(snap.ClosedAt, status.ClosedAt)
		status.SoldOutAt = timestamp(s.seen.SoldOutAt, status.SoldOutAt)
	}
	if a := s.seen.Audit; a != nil {
		status.Audit = &sales.AuditStatus{Passed: a.OK, TakenAt: *timestamp(a.TakenAt, nil)}
		if before := s.sale.Status.Audit; before != nil && before.Passed == a.OK {
			status.Audit.TakenAt = before.TakenAt // a repeated audit with the same result is no news
		}
		for _, c := range a.Failed() {
			status.Audit.Failed = append(status.Audit.Failed, c.ID+": "+c.Claim)
		}
	}
	if sum := s.seen.Summary; sum != nil && s.seen.Sale != nil {
		status.Result = &sales.ResultStatus{Sold: s.seen.Sale.Sold, Unsold: s.seen.Sale.Units - s.seen.Sale.Sold, RefundsDue: sum.RefundsDue, PeakClaimsPerSecond: sum.PeakGrants}
		if !sum.FirstGrantAt.IsZero() {
			status.Result.FirstGrantAt = &metav1.MicroTime{Time: sum.FirstGrantAt.UTC()}
		}
	}
	status.Endpoint, status.Reservers = "", nil
	if s.decision.Run {
		ready, desired := s.seen.Reservers.Ready, s.decision.Want
		status.Endpoint = endpoint(s.sale)
		status.Reservers = &sales.ReserversStatus{Ready: ready, Desired: desired, Summary: fmt.Sprintf("%d/%d", ready, desired)}
	}
	return status
}

// timestamp gives a time at the API's precision of a second, or the old one while there is none.
func timestamp(t time.Time, old *metav1.Time) *metav1.Time {
	if t.IsZero() {
		return old
	}
	return &metav1.Time{Time: t.UTC().Truncate(time.Second)}
}

// announce tells of transitions, as events and log lines.
func (s *scope) announce(ctx context.Context, before sales.FlashSaleStatus) {
	now := s.sale.Status
	event := func(kind, reason, action, message string) {
		s.Events.Eventf(s.sale, nil, kind, reason, action, "%s", message)
		log.FromContext(ctx).Info("announced", "event", reason, "message", message)
	}
	if now.Phase != before.Phase {
		kind := corev1.EventTypeNormal
		if now.Phase == sales.PhaseFailed {
			kind = corev1.EventTypeWarning
		}
		event(kind, string(now.Phase), "EnterPhase", now.Message)
		if now.Phase == sales.PhaseLive && now.Reservers != nil && now.Reservers.Ready < now.Reservers.Desired {
			event(corev1.EventTypeWarning, "NotWarm", "EnterPhase", fmt.Sprintf("the sale opened with %s reservation pods ready", now.Reservers.Summary))
		}
	}
	for _, kind := range []string{sales.ConditionDatabaseReachable, sales.ConditionReserversAvailable, sales.ConditionInventoryLoaded} {
		old, new := meta.FindStatusCondition(before.Conditions, kind), meta.FindStatusCondition(now.Conditions, kind)
		inUse := func(c *metav1.Condition) bool { return c != nil && c.Reason == sales.ReasonUnitsInUse }
		switch {
		case kind == sales.ConditionInventoryLoaded && !inUse(old) && !inUse(new): // loading is told by the phases
		case new == nil || old == nil && new.Reason == sales.ReasonReachable || old == nil && new.Reason == sales.ReasonAvailable || old != nil && old.Status == new.Status && old.Reason == new.Reason:
		case new.Reason == inventory.ReasonNotDurable, new.Reason == sales.ReasonClockSkew:
			event(corev1.EventTypeWarning, new.Reason, "Check", new.Message)
		case new.Status == metav1.ConditionTrue:
			event(corev1.EventTypeNormal, new.Reason, "Recover", new.Message)
		case kind == sales.ConditionDatabaseReachable || new.Reason != sales.ReasonUnavailable || now.Phase == sales.PhaseLive && before.Phase == sales.PhaseLive:
			event(corev1.EventTypeWarning, new.Reason, "Wait", new.Message)
		}
	}
}
