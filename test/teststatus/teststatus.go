// Package teststatus knows the rules that every status of a FlashSale keeps, whatever happens to the sale: those that
// kubectl wait, kstatus (Flux) and Argo CD rely on.
package teststatus

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sales "flashsale.dev/operator/api/v1alpha1"
)

// Violations gives the rules that the object's status breaks, none of an object that the controller has not seen yet.
func Violations(sale *sales.FlashSale) (broken []string) {
	status := sale.Status
	say := func(format string, args ...any) { broken = append(broken, fmt.Sprintf(format, args...)) }
	if status.ObservedGeneration == -1 {
		if len(status.Conditions) > 0 || status.Phase != "" {
			say("a status that nobody wrote has phase %q and %d conditions", status.Phase, len(status.Conditions))
		}
		return broken
	}
	if status.ObservedGeneration < 1 || status.ObservedGeneration > sale.Generation {
		say("observedGeneration is %d of generation %d", status.ObservedGeneration, sale.Generation)
	}
	if status.Phase == "" || status.Message == "" {
		say("phase %q, message %q", status.Phase, status.Message)
	}
	for _, c := range status.Conditions {
		switch c.Type {
		case sales.ConditionReconciling, sales.ConditionStalled:
			if c.Status != metav1.ConditionTrue {
				say("%s is present and %s", c.Type, c.Status)
			}
		case sales.ConditionReady, sales.ConditionInventoryLoaded, sales.ConditionReserversAvailable, sales.ConditionSelling,
			sales.ConditionSweeperHealthy, sales.ConditionDatabaseReachable:
			if c.Status == metav1.ConditionUnknown {
				say("%s is Unknown", c.Type)
			}
		default:
			say("a condition %s that nobody documented", c.Type)
		}
		if c.Reason == "" || c.Message == "" || c.LastTransitionTime.IsZero() {
			say("%s lacks a reason, message or time: %+v", c.Type, c)
		}
		if c.ObservedGeneration != status.ObservedGeneration {
			say("%s is of generation %d, the status of %d", c.Type, c.ObservedGeneration, status.ObservedGeneration)
		}
	}
	ready := meta.FindStatusCondition(status.Conditions, sales.ConditionReady)
	reconciling := meta.FindStatusCondition(status.Conditions, sales.ConditionReconciling)
	stalled := meta.FindStatusCondition(status.Conditions, sales.ConditionStalled)
	if ready == nil {
		say("Ready is missing")
		return broken
	}
	if reconciling != nil && stalled != nil {
		say("Reconciling and Stalled are both there")
	}
	if trouble := reconciling != nil || stalled != nil; trouble == (ready.Status == metav1.ConditionTrue) {
		say("Ready is %s, with Reconciling %v and Stalled %v", ready.Status, reconciling, stalled)
	}
	if meta.IsStatusConditionTrue(status.Conditions, sales.ConditionSelling) && status.Phase != sales.PhaseLive {
		say("Selling in phase %s", status.Phase)
	}
	if i := status.Inventory; i != nil && i.Available+i.Held+i.Sold != i.Loaded {
		say("%d loaded, but %d available, %d held and %d sold", i.Loaded, i.Available, i.Held, i.Sold)
	}
	if status.Phase == sales.PhaseClosed {
		if ready.Status != metav1.ConditionTrue || status.Endpoint != "" || status.Reservers != nil {
			say("closed, with Ready %s, endpoint %q and reservers %v", ready.Status, status.Endpoint, status.Reservers)
		}
		if ready.Reason != sales.ReasonMissed && (status.Audit == nil || !status.Audit.Passed || status.Result == nil || status.ClosedAt == nil) {
			say("closed as %s, with audit %+v, result %+v, closedAt %v", ready.Reason, status.Audit, status.Result, status.ClosedAt)
		}
	}
	return broken
}
